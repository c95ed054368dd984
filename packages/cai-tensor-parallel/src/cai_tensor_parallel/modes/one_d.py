"""1d tensor parallelism: column-cut, then row-cut linear layers (Megatron-LM, Shoeybi et al., arXiv:1909.08053).

One all-reduce forward for every row-cut layer, one backward for every input of column-cut layers (of queries, keys and
values one), beside the weight's gradient.
A cut layer is a rule of the linear seam (`cai_mesh.gradients.linear`), whatever its products are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from cai_mesh.comm import Members, gathered, start_sum
from cai_mesh.errors import PlanError
from cai_mesh.gradients import PLAIN, TRANSPOSED, Local, Readers, Ready, own_products, route
from cai_mesh.layout import Replicate, Shard
from cai_mesh.protocols import TensorHandle
from cai_tensor_parallel.modes.context import ModeContext
from cai_tensor_parallel.modes.experts import count_once, sum_parts
from cai_tensor_parallel.modes.head_runs import own_heads, picked_heads
from cai_tensor_parallel.modes.parameters import cut_parameter
from cai_tensor_parallel.modes.reading import readers_of
from cai_tensor_parallel.modes.sequence import Sequence
from cai_tensor_parallel.modes.shared import sum_gradients
from cai_tensor_parallel.modes.tables import cut_columns, cut_features, cut_rows
from cai_tensor_parallel.modes.tokens import (
    gather_matmul_tokens,
    gathered_tokens,
    matmul_scatter_tokens,
    scatter_tokens_beside,
    start_scatter_tokens,
)
from cai_tensor_parallel.modes.whole import Picked, Tail
from cai_tensor_parallel.plans.plan import STREAM_ROLES, Role

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Column(Local):
    """Output features are cut: weight [out/tp, in] and bias [out/tp] make [..., out/tp] of a whole x [..., in].

    Backward sums the gradient of x over the ranks while the weight's gradient is computed; where several layers read
    the same x, once for all of them.

    Args:
        ranks: that share the layer.
        gather: so many features of all ranks are put together again, for a result used alike on all ranks; 0: they
            stay cut.
        readers: layers of the same module, which may read the same x.
        leads: its product may be made while x is put together.
        overlap: a sum that is scattered travels by copy engines (`cai_tensor_parallel.modes.overlap`).
    """

    ranks: Members
    gather: int = 0
    readers: Readers | None = None
    leads: bool = False
    overlap: bool = False

    @property
    def key(self) -> str:
        return f"column of {self.ranks.name}, {self.products.key}"

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        y, saved = self.products.forward(x, weight, bias)
        return (self._whole(y) if self.gather else y), saved

    def of_product(
        self, product: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        """Do as `forward` does, with a product [tokens, out/tp] that is there, where a layer `leads`."""
        y = product.view(*x.shape[:-1], product.shape[-1])
        return (y if bias is None else y + bias), (x,)

    def _whole(self, y: torch.Tensor) -> torch.Tensor:
        """[..., gather] of parts that may differ by one feature, as consecutive parts of a vocabulary do."""
        widest = -(-self.gather // self.ranks.size)
        return gathered(F.pad(y, (0, widest - y.shape[-1])), -1, self.ranks)[..., : self.gather]

    def backward(
        self, dy: torch.Tensor, weight: torch.Tensor, saved: Tensors, **needs: bool
    ) -> tuple[TensorHandle, Tensors, torch.Tensor | None]:
        dx, operands, db = self.own_gradients(dy, weight, saved, **needs)
        return (Ready(dx) if dx is None else self.start_input_sum(dx, scattered=False)), operands, db

    def own_gradients(
        self, dy: torch.Tensor, weight: torch.Tensor, saved: Tensors, **needs: bool
    ) -> tuple[torch.Tensor | None, Tensors, torch.Tensor | None]:
        """Do as `backward` does, but return of the gradient of x this rank's part of the sum."""
        if self.gather:
            start = min(self.ranks.rank * -(-self.gather // self.ranks.size), self.gather)
            dy = dy[..., start : start + weight.shape[int(self.products is TRANSPOSED)]].contiguous()
        return self.products.backward(dy, weight, saved, **needs)

    def start_input_sum(self, dx: torch.Tensor, *, scattered: bool) -> TensorHandle:
        """Start to sum a gradient of x over the ranks; `scattered`: for this rank's part of the tokens alone."""
        if not scattered:
            return start_sum(dx, self.ranks)
        return start_scatter_tokens(dx, self.ranks, overlap=self.overlap)

    def scatter_beside(
        self, dx: torch.Tensor, grad: torch.Tensor, token: torch.Tensor, operands: Tensors
    ) -> torch.Tensor:
        """The scattered sum of dx, and meanwhile the weight's gradient into its chunk, in a graph."""
        return scatter_tokens_beside(dx, self.ranks, grad, token, operands, self.key)


@dataclass(frozen=True)
class Row(Local):
    """Input features are cut: x [..., in/tp] and weight [out, in/tp] make parts of [..., out], summed over the ranks.

    The whole bias [out] is added once, after the sum.

    Args:
        ranks: that share the layer.
        split: x comes whole, and each rank takes its part of it.
        sequence: the cut of the stream; where it is on, the sum is scattered along the sequence.
        overlap: products run beside what travels along the sequence (`cai_tensor_parallel.modes.overlap`).
    """

    ranks: Members
    split: bool = False
    sequence: Sequence | None = None
    overlap: bool = False

    @property
    def key(self) -> str:
        return f"row of {self.ranks.name}, {self.products.key}"

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        if self.split:
            x = self.ranks.own_part(x, -1)
        scattered = self.sequence is not None and self.sequence.on
        y, saved = self._summed(x, weight, scattered=scattered)
        if self.sequence is not None:  # backward may come when the sequence is cut otherwise
            saved = (y.new_empty(int(scattered)), *saved)
        return (y if bias is None else y + bias), saved

    def _summed(
        self, x: torch.Tensor, weight: torch.Tensor, *, scattered: bool
    ) -> tuple[torch.Tensor, Tensors]:
        """The product, summed over the ranks, and what is saved."""
        if scattered and self.overlap:
            return matmul_scatter_tokens(x, self._matrix(weight), self.ranks), (x,)
        y, saved = self.products.forward(x, weight, None)
        started = start_scatter_tokens(y, self.ranks) if scattered else start_sum(y, self.ranks)
        summed = started.wait()
        assert summed is not None
        return summed, saved

    def backward(
        self, dy: torch.Tensor, weight: torch.Tensor, saved: Tensors, **needs: bool
    ) -> tuple[TensorHandle, Tensors, torch.Tensor | None]:
        if self.sequence is not None:
            scattered, saved = saved[0], saved[1:]
            if scattered.numel():
                return self._gathered(dy, weight, saved, **needs)
        dx, operands, db = self.products.backward(dy, weight, saved, **needs)
        if dx is None or not self.split:
            return Ready(dx), operands, db
        return Ready(gathered(dx, -1, self.ranks)), operands, db

    def _gathered(
        self, dy: torch.Tensor, weight: torch.Tensor, saved: Tensors, **needs: bool
    ) -> tuple[TensorHandle, Tensors, torch.Tensor | None]:
        """The same of a gradient that is cut along the sequence; that of the bias is summed over the ranks."""
        db = start_sum(dy.flatten(0, -2).sum(0), self.ranks) if needs["needs_bias"] else None
        if self.overlap and needs["needs_input"]:
            dx, full = gather_matmul_tokens(dy, self._matrix(weight).t(), self.ranks)
            operands = (full, *saved) if needs["needs_weight"] else ()
        else:
            full = gathered_tokens(dy, self.ranks)
            dx, operands, _ = self.products.backward(full, weight, saved, **(needs | {"needs_bias": False}))
        if dx is not None and self.split:
            dx = gathered(dx, -1, self.ranks)
        return Ready(dx), operands, None if db is None else db.wait()

    def _matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as a matrix [in/tp, out]."""
        return weight if self.products is TRANSPOSED else weight.t()


def apply(module: nn.Module, role: Role, context: ModeContext) -> None:
    """Give one module its role. Raises `PlanError` when the module cannot play it."""
    if role.kind in ("replicated", "replicate", "replicated_experts", "local_params", *STREAM_ROLES):
        return
    if role.parameter:
        cut_parameter(module, role, context)
    elif role.kind == "replicated_with_grad_allreduce":
        sum_gradients(module, context.group, context.cutter)
    elif role.kind in ("vocab_embedding", "embedding_rowwise"):
        cut_rows(module, context)
    elif role.kind == "embedding_colwise":
        cut_features(module, context)
    elif role.kind in ("moe_tp_experts", "all_reduce"):
        sum_parts(module, context)
    elif role.kind == "moe_identity_expert":
        count_once(module, context)
    elif role.kind in ("kv_heads", "mla_kv_a_proj"):
        _use_part(module, role, context)
    elif role.kind == "colwise" and isinstance(module, nn.Embedding):
        cut_columns(module, context)
    else:
        _cut_linear(module, role, context)


def _cut_linear(module: nn.Module, role: Role, context: ModeContext) -> None:
    products, ranks = own_products(module), Members.of(context.group)
    if products is None:
        raise cannot_be_cut(module, context)
    weight = module._parameters.get("weight")
    if weight is None:
        raise cannot_be_cut(module, context, "weight computed from other parameters")
    rowwise = role.kind.startswith("rowwise")
    dim = int(rowwise) if products is not TRANSPOSED else int(not rowwise)
    sections = sections_of(weight.shape[dim], role, context)
    features = weight.shape[dim] // role.blocks
    if role.kind != "vocab_head" and features % (context.cutter.degree if role.unit == 1 else role.unit):
        raise PlanError(
            f"{context.module_name}: its {'input' if rowwise else 'output'} features do not divide",
            got=f"{features} features over {context.cutter.degree} ranks",
            fix="choose a tensor-parallel degree that divides them",
        )
    check = getattr(products, "check_features", None)
    if check is not None:
        local_size = (
            len(own_heads(features // role.unit, context.cutter.degree, ranks.rank)) * role.unit * role.blocks
        )
        check(*(local_size if d == dim else size for d, size in enumerate(weight.shape)))
    rule: Local
    if rowwise:
        sequence = None if context.module_name in context.enclosed else context.sequence
        split = role.kind == "rowwise_split_input"
        rule = Row(products, ranks, split, sequence, context.overlap and products in (PLAIN, TRANSPOSED))
    else:
        gathers = role.kind in ("colwise_gather_output", "classifier") or (
            role.kind == "vocab_head" and not context.sharded_logits
        )
        readers = readers_of(context.module_name, context.readers)
        gather = weight.shape[dim] if gathers else 0
        leads = context.overlap and not gather and products in (PLAIN, TRANSPOSED)
        leads = leads and readers is not None and readers.may_lead and readers.leads is None
        if leads and readers is not None:
            readers.leads = module
        rule = Column(products, ranks, gather, readers, leads, context.overlap)
    if not route(module, rule):
        raise cannot_be_cut(module, context)
    context.cutter.cut(module, "weight", Shard(dim, sections, role.unit))
    if module._parameters.get("bias") is not None:
        context.cutter.cut(module, "bias", Replicate() if rowwise else Shard(0, sections, role.unit))


def _use_part(module: nn.Module, role: Role, context: ModeContext) -> None:
    """Leave a linear layer whole, and let this rank use its part of the results."""
    products, ranks = own_products(module), Members.of(context.group)
    if products is None:
        raise cannot_be_cut(module, context)
    rule: Local = Tail(products, ranks, role.width)
    if role.heads is not None:
        picked = picked_heads(*role.heads, context.cutter.degree, ranks.rank)
        rule = Picked(products, ranks, role.heads[1], picked)
    if not route(module, rule):
        raise cannot_be_cut(module, context)


def cannot_be_cut(module: nn.Module, context: ModeContext, why: str = "forward of its own") -> PlanError:
    """The error for what is no linear layer."""
    return PlanError(
        f"{context.module_name} cannot be cut as a linear layer",
        got=f"{type(module).__name__} with a {why}",
        expected="an nn.Linear, a Conv1D, or a layer that brings its linear_products",
        fix="parallelize before transforms that replace forwards or weights, or give this module another role",
    )


def sections_of(size: int, role: Role, context: ModeContext) -> tuple[int, ...] | None:
    """Lengths of the blocks packed in a layer's output; None for one."""
    if role.blocks == 1:
        return None
    if size % role.blocks:
        raise PlanError(
            f"{context.module_name}: its output is not {role.blocks} equal blocks", got=f"{size} features"
        )
    return (size // role.blocks,) * role.blocks
