"""1d tensor parallelism: column-cut, then row-cut linear layers (Megatron-LM, Shoeybi et al., arXiv:1909.08053).

One all-reduce forward for every row-cut layer, one backward for every column-cut input. The functions are plain
maths on tensors and a group; `apply` binds them to a module.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import copy_to, gather_from, reduce_from, scatter_to
from cai_mesh.errors import PlanError
from cai_mesh.layout import Replicate, Shard
from cai_tensor_parallel.modes.context import Matmul, ModeContext
from cai_tensor_parallel.plan import Role
from cai_tensor_parallel.vocab import vocab_parallel_embedding, vocab_start


def colwise_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    matmul: Matmul,
) -> torch.Tensor:
    """[..., in] whole -> [..., out/tp], with weight [out/tp, in] and bias [out/tp]."""
    y = matmul(copy_to(x, group), weight)
    return y if bias is None else y + bias


def rowwise_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    matmul: Matmul,
) -> torch.Tensor:
    """[..., in/tp] -> [..., out] whole, with weight [out, in/tp] and the whole bias [out] added once."""
    y = reduce_from(matmul(x, weight), group)
    return y if bias is None else y + bias


def apply(module: nn.Module, role: Role, context: ModeContext) -> None:
    """Give one module its role. Raises `PlanError` when the module cannot play it."""
    if role.kind == "replicated":
        return
    if role.kind == "replicated_with_grad_allreduce":
        _share_partial(module, context)
    elif role.kind == "vocab_embedding":
        _cut_embedding(module, context)
    else:
        _cut_linear(module, role, context)


def _cut_linear(module: nn.Module, role: Role, context: ModeContext) -> None:
    transposed = _is_transposed(module, context)
    weight = module._parameters["weight"]
    assert weight is not None
    rowwise = role.kind.startswith("rowwise")
    dim = int(rowwise) if not transposed else int(not rowwise)
    sections = _sections(weight.shape[dim], role, context)
    if role.kind != "vocab_head" and (weight.shape[dim] // role.blocks) % context.cutter.degree:
        raise PlanError(
            f"{context.module_name}: its {'input' if rowwise else 'output'} features do not divide",
            got=f"{weight.shape[dim] // role.blocks} features over {context.cutter.degree} ranks",
            fix="choose a tensor-parallel degree that divides them",
        )
    context.cutter.cut(module, "weight", Shard(dim, sections))
    if module._parameters.get("bias") is not None:
        context.cutter.cut(module, "bias", Replicate() if rowwise else Shard(0, sections))
    maths = rowwise_linear if rowwise else colwise_linear
    group, matmul = context.group, context.matmul
    split_input, gather_output = role.kind == "rowwise_split_input", role.kind == "colwise_gather_output"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if split_input:
            x = scatter_to(x, -1, group)
        weight = self.weight.t() if transposed else self.weight
        y = maths(x, weight, self.bias, group, matmul)
        return gather_from(y, -1, group) if gather_output else y

    module.forward = types.MethodType(forward, module)


def _is_transposed(module: nn.Module, context: ModeContext) -> bool:
    """Whether the weight is [in, out], as in GPT-2's Conv1D, and not [out, in]."""
    if isinstance(module, nn.Linear):
        return False
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return True
    raise PlanError(
        f"{context.module_name} cannot be cut as a linear layer",
        got=type(module).__name__,
        expected="Linear or Conv1D",
    )


def _sections(size: int, role: Role, context: ModeContext) -> tuple[int, ...] | None:
    if role.blocks == 1:
        return None
    if size % role.blocks:
        raise PlanError(
            f"{context.module_name}: its output is not {role.blocks} equal blocks", got=f"{size} features"
        )
    return (size // role.blocks,) * role.blocks


def _cut_embedding(module: nn.Module, context: ModeContext) -> None:
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        raise PlanError(
            f"{context.module_name} cannot be cut by vocabulary", got=module, expected="a plain Embedding"
        )
    weight = context.cutter.cut(module, "weight", Shard(0))
    start = vocab_start(weight)
    group, scale = context.group, type(module).forward

    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_embedding(
            ids, self.weight, group, vocab_start=start, padding_idx=self.padding_idx
        )

    if scale is not nn.Embedding.forward and not hasattr(module, "embed_scale"):
        raise PlanError(
            f"{context.module_name} computes more than a lookup",
            got=type(module).__name__,
            expected="nn.Embedding",
        )
    if hasattr(module, "embed_scale"):
        lookup = forward

        def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
            return lookup(self, ids) * self.embed_scale.to(self.weight.dtype)

    module.forward = types.MethodType(forward, module)


def _share_partial(module: nn.Module, context: ModeContext) -> None:
    """Sum the gradients of parameters that every rank applies to its own part of the activations."""
    original, group = module.forward, context.group

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = {name: p for name, p in self._parameters.items() if p is not None}
        self._parameters.update({name: copy_to(p, group) for name, p in own.items()})
        try:
            return original(*args, **kwargs)
        finally:
            self._parameters.update(own)

    module.forward = types.MethodType(forward, module)
