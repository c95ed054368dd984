"""1d tensor parallelism: column-cut, then row-cut linear layers (Megatron-LM, Shoeybi et al., arXiv:1909.08053).

One all-reduce forward for every row-cut layer, one backward for every column-cut input, beside the weight's gradient.
A cut layer is a rule of the linear seam (`cai_mesh.gradients.linear`), whatever its products are.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cai_mesh.comm import Members, copy_to, gathered, start_sum
from cai_mesh.errors import PlanError
from cai_mesh.gradients import TRANSPOSED, Local, Ready, own_products, route
from cai_mesh.layout import Replicate, Shard
from cai_mesh.protocols import TensorHandle
from cai_tensor_parallel.modes.context import ModeContext
from cai_tensor_parallel.plan import Role
from cai_tensor_parallel.vocab import vocab_parallel_embedding, vocab_start

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Column(Local):
    """Output features are cut: weight [out/tp, in] and bias [out/tp] make [..., out/tp] of a whole x [..., in].

    Backward sums the gradient of x over the ranks while the weight's gradient is computed.

    Args:
        ranks: that share the layer.
        gather: so many features of all ranks are put together again, for a result used alike on all ranks; 0: they
            stay cut.
    """

    ranks: Members
    gather: int = 0

    @property
    def key(self) -> str:
        return f"column of {self.ranks.name}, {self.products.key}"

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        y, saved = self.products.forward(x, weight, bias)
        return (self._whole(y) if self.gather else y), saved

    def _whole(self, y: torch.Tensor) -> torch.Tensor:
        """[..., gather] of parts that may differ by one feature, as consecutive parts of a vocabulary do."""
        widest = -(-self.gather // self.ranks.size)
        return gathered(F.pad(y, (0, widest - y.shape[-1])), -1, self.ranks)[..., : self.gather]

    def backward(
        self, dy: torch.Tensor, weight: torch.Tensor, saved: Tensors, **needs: bool
    ) -> tuple[TensorHandle, Tensors, torch.Tensor | None]:
        if self.gather:
            start = min(self.ranks.rank * -(-self.gather // self.ranks.size), self.gather)
            dy = dy[..., start : start + weight.shape[int(self.products is TRANSPOSED)]].contiguous()
        dx, operands, db = self.products.backward(dy, weight, saved, **needs)
        return (Ready(None) if dx is None else start_sum(dx, self.ranks)), operands, db


@dataclass(frozen=True)
class Row(Local):
    """Input features are cut: x [..., in/tp] and weight [out, in/tp] make parts of [..., out], summed over the ranks.

    The whole bias [out] is added once, after the sum.

    Args:
        ranks: that share the layer.
        split: x comes whole, and each rank takes its part of it.
    """

    ranks: Members
    split: bool = False

    @property
    def key(self) -> str:
        return f"row of {self.ranks.name}, {self.products.key}"

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        if self.split:
            x = self.ranks.own_part(x, -1)
        y, saved = self.products.forward(x, weight, None)
        y = start_sum(y, self.ranks).wait()
        return (y if bias is None else y + bias), saved

    def backward(
        self, dy: torch.Tensor, weight: torch.Tensor, saved: Tensors, **needs: bool
    ) -> tuple[TensorHandle, Tensors, torch.Tensor | None]:
        dx, operands, db = self.products.backward(dy, weight, saved, **needs)
        if dx is None or not self.split:
            return Ready(dx), operands, db
        return Ready(gathered(dx, -1, self.ranks)), operands, db


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
    products, ranks = own_products(module), Members.of(context.group)
    if products is None:
        raise _cannot_be_cut(module, context)
    weight = module._parameters.get("weight")
    if weight is None:
        raise _cannot_be_cut(module, context, "weight computed from other parameters")
    rowwise = role.kind.startswith("rowwise")
    dim = int(rowwise) if products is not TRANSPOSED else int(not rowwise)
    sections = _sections(weight.shape[dim], role, context)
    if role.kind != "vocab_head" and (weight.shape[dim] // role.blocks) % context.cutter.degree:
        raise PlanError(
            f"{context.module_name}: its {'input' if rowwise else 'output'} features do not divide",
            got=f"{weight.shape[dim] // role.blocks} features over {context.cutter.degree} ranks",
            fix="choose a tensor-parallel degree that divides them",
        )
    check = getattr(products, "check_features", None)
    if check is not None:
        check(*(size // context.cutter.degree if d == dim else size for d, size in enumerate(weight.shape)))
    rule: Local
    if rowwise:
        rule = Row(products, ranks, split=role.kind == "rowwise_split_input")
    else:
        whole = role.kind == "colwise_gather_output" or (
            role.kind == "vocab_head" and not context.sharded_logits
        )
        rule = Column(products, ranks, gather=weight.shape[dim] if whole else 0)
    if not route(module, rule):
        raise _cannot_be_cut(module, context)
    context.cutter.cut(module, "weight", Shard(dim, sections))
    if module._parameters.get("bias") is not None:
        context.cutter.cut(module, "bias", Replicate() if rowwise else Shard(0, sections))


def _cannot_be_cut(module: nn.Module, context: ModeContext, why: str = "forward of its own") -> PlanError:
    return PlanError(
        f"{context.module_name} cannot be cut as a linear layer",
        got=f"{type(module).__name__} with a {why}",
        expected="an nn.Linear, a Conv1D, or a layer that brings its linear_products",
        fix="parallelize before transforms that replace forwards or weights, or give this module another role",
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
    _check_embedding(module, context)
    assert isinstance(module, nn.Embedding)
    vocabulary = module.weight.shape[0]
    start = vocab_start(context.cutter.cut(module, "weight", Shard(0)))
    group, scaled = context.group, hasattr(module, "embed_scale")

    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        rows = vocab_parallel_embedding(
            ids,
            self.weight,
            group,
            vocab_start=start,
            padding_idx=self.padding_idx,
            vocab_size=vocabulary,
            sparse=self.sparse,
        )
        return rows * self.embed_scale.to(self.weight.dtype) if scaled else rows

    module.forward = types.MethodType(forward, module)


def _check_embedding(module: nn.Module, context: ModeContext) -> None:
    """Raise `PlanError` for what is not a lookup, alone or times `embed_scale`, in a weight of its own."""
    got = ""
    if not isinstance(module, nn.Embedding) or module._parameters.get("weight") is None:
        got = f"{type(module).__name__} without a weight of its own"
    elif "forward" in module.__dict__:
        got = f"{type(module).__name__} with a replaced forward"
    elif type(module).forward is not nn.Embedding.forward and not hasattr(module, "embed_scale"):
        got = f"{type(module).__name__}, which computes more than a lookup"
    elif module.max_norm is not None or module.scale_grad_by_freq:
        got = "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
    if got:
        raise PlanError(
            f"{context.module_name} cannot be cut by vocabulary",
            got=got,
            expected="a plain Embedding",
            fix="pass a plan that gives it the role replicated",
        )


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
