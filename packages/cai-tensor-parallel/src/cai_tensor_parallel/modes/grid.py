"""The roles of modes 2d, 2.5d and 3d: each cuts a module's parameters and lets it compute with its part.

What differs between the modes is data (`forms.GRIDS`) and the rule of a linear layer (`two_d.Summa`, `three_d.Cube`).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cai_mesh.comm import all_gather, all_to_all, copy_to, gather_from, reduce_scatter, scatter_to
from cai_mesh.errors import PlanError
from cai_mesh.gradients import PLAIN, TRANSPOSED, Local, own_products, route
from cai_mesh.layout import Shard
from cai_mesh.protocols import LinearProducts
from cai_tensor_parallel.modes.context import ModeContext, Ranks
from cai_tensor_parallel.modes.cutter import Cuts
from cai_tensor_parallel.modes.forms import Form
from cai_tensor_parallel.modes.norms import apply_norm, recognise
from cai_tensor_parallel.modes.one_d import cannot_be_cut, sections_of
from cai_tensor_parallel.modes.shared import sum_gradients
from cai_tensor_parallel.modes.tables import check_embedding
from cai_tensor_parallel.modes.three_d import Cube
from cai_tensor_parallel.modes.two_d import Summa
from cai_tensor_parallel.modes.vocab import vocab_parallel_embedding, vocab_start
from cai_tensor_parallel.plans.plan import Role


def apply(module: nn.Module, role: Role, context: ModeContext) -> None:
    """Give one module its role. Raises `PlanError` when the module, or the mode, cannot play it."""
    if role.kind not in ROLES or role.parameter:
        raise PlanError(
            f"{context.module_name} has a role that mode {context.mode} does not know",
            got=f"{role.kind} of its {role.parameter}" if role.parameter else _told(role),
            expected=", ".join(ROLES),
            fix='mode="1d", or a plan that gives it another role',
        )
    ROLES[role.kind](module, role, context)


def _told(role: Role) -> str:
    if role.heads is None:
        return role.kind
    return f"{role.heads[1]} key/value heads, which do not divide over the ranks that share features"


# -- linear layers -------------------------------------------------------------------------------------------------


def _linear(module: nn.Module, role: Role, context: ModeContext) -> None:
    """A layer between the forms that its role names; what comes whole is cut, what is to be whole is gathered."""
    grid, inward = context.grid, role.kind.startswith(("colwise", "packed", "vocab", "classifier"))
    before, after = (grid.stream, grid.inner) if inward else (grid.inner, grid.stream)
    products = own_products(module)
    weight = module._parameters.get("weight")
    if products not in (PLAIN, TRANSPOSED) or weight is None:
        raise cannot_be_cut(module, context)
    out_dim = int(products is TRANSPOSED)
    _check_divides(weight.shape[1 - out_dim], before.features, context, "input features")
    sections = sections_of(weight.shape[out_dim], role, context)
    if role.kind not in ("vocab_head", "classifier"):
        _check_divides(weight.shape[out_dim] // role.blocks, after.features, context, "output features")
    if not route(module, _rule(products, before, after, weight.shape[out_dim], context)):
        raise cannot_be_cut(module, context)
    whole_in, whole_out = weight.shape[1 - out_dim], weight.shape[out_dim]
    context.cutter.place(module, "weight", _weight_cuts(before, after, out_dim, sections, context))
    if module._parameters.get("bias") is not None:
        context.cutter.place(module, "bias", ((after.features, Shard(0, sections)),))
    _take_part(module, whole_in, before, context)
    if role.kind == "colwise_gather_output" and before != after:
        _back_to_stream(module, context)
    elif role.kind == "classifier" or (role.kind == "vocab_head" and not context.sharded_logits):
        _give_whole(module, whole_out, after, context)


def _rule(products: LinearProducts, before: Form, after: Form, outs: int, context: ModeContext) -> Local:
    grid, members = context.grid, context.members
    samples = members(after.batch)
    assert samples is not None
    if grid.thirds:
        ins, out, thirds = members(before.features), members(after.features), members(grid.thirds)
        assert ins is not None and out is not None and thirds is not None
        return Cube(products, ins, out, thirds, samples)
    rows, cols = members((grid.rows,)), members(after.features)
    assert rows is not None and cols is not None
    return Summa(products, rows, cols, members(grid.copies), samples, parts_of(outs, cols.size))


def parts_of(size: int, degree: int) -> tuple[int, ...]:
    """Lengths of `size` elements cut as `Shard` cuts them."""
    widest = -(-size // degree)
    return tuple(min(widest, max(size - widest * at, 0)) for at in range(degree))


def _weight_cuts(
    before: Form, after: Form, out_dim: int, sections: tuple[int, ...] | None, context: ModeContext
) -> Cuts:
    grid = context.grid
    outs = after.features if grid.thirds else (grid.rows,)
    return (
        (outs, Shard(out_dim, sections)),
        (before.features, Shard(1 - out_dim)),
        (grid.thirds, Shard(1 - out_dim)),
    )


def _take_part(module: nn.Module, width: int, form: Form, context: ModeContext) -> None:
    """An input that comes with all its features is cut; its gradient is put together again."""
    group, part = context.ranks.group(form.features), width // context.ranks.degree(form.features)

    def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if args and args[0].shape[-1] == width != part:
            return scatter_to(args[0], -1, group), *args[1:]
        return None

    module.register_forward_pre_hook(take)


def _give_whole(module: nn.Module, width: int, form: Form, context: ModeContext) -> None:
    """The result with all features of all samples, used alike on every rank."""

    def give(module: nn.Module, args: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        return unsharded(y, width, form, context.ranks)

    module.register_forward_hook(give)


def unsharded(y: torch.Tensor, width: int, form: Form, ranks: Ranks) -> torch.Tensor:
    """[samples, ..., width] from a part in some form; differentiable, the result used alike on every rank."""
    widest = -(-width // ranks.degree(form.features))
    y = torch.nn.functional.pad(y, (0, widest - y.shape[-1]))
    y = gather_from(y, -1, ranks.group(form.features))[..., :width]
    return gather_from(y, 0, ranks.group(form.batch))


def _back_to_stream(module: nn.Module, context: ModeContext) -> None:
    """Return from the inner form to that of the stream: ranks that differ in both axes exchange what they hold."""
    swap = Exchange(context)
    module.register_forward_hook(lambda module, args, y: swap(y))


class Exchange:
    """The exchange between the stream's and the inner form of a cube: rank (i, j, k) gets what rank (i, k, j) holds."""

    def __init__(self, context: ModeContext) -> None:
        grid = context.grid
        self.axes = (grid.stream.batch[-1], grid.inner.batch[-1])
        degree, ranks = context.ranks.degree(self.axes[:1]), context.ranks
        self.group = ranks.group(self.axes)
        self.partner = ranks.index(self.axes[1:]) * degree + ranks.index(self.axes[:1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The partner's `x`, of the same shape; differentiable for floating points."""
        assert self.group is not None
        splits = [x.numel() if rank == self.partner else 0 for rank in range(self.group.size())]
        flat = x.contiguous().view(-1)
        return all_to_all(flat, self.group, out_splits=splits, in_splits=splits).view(x.shape)


# -- everything else -----------------------------------------------------------------------------------------------


def _vocab_embedding(module: nn.Module, role: Role, context: ModeContext) -> None:
    """Rows over one axis, features over that of the stream. Each rank looks up what all of the first axis ask for."""
    check_embedding(module, context)
    assert isinstance(module, nn.Embedding)
    grid, ranks = context.grid, context.ranks
    vocabulary, features = module.weight.shape
    _check_divides(features, grid.stream.features, context, "features")
    part = context.cutter.place(
        module,
        "weight",
        (
            ((grid.rows,), Shard(0)),
            (grid.stream.features, Shard(1)),
            (grid.thirds, Shard(1)),
        ),
    )
    start, scaled = vocab_start(part), hasattr(module, "embed_scale")
    samples, rows, copies, thirds = (
        ranks.group(axes) for axes in (grid.inner.batch[-1:], (grid.rows,), grid.copies, grid.thirds)
    )

    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        weight = all_gather(copy_to(self.weight, copies), 1, thirds)
        embedded = vocab_parallel_embedding(
            all_gather(ids, 0, samples),
            weight,
            None,
            vocab_start=start,
            padding_idx=self.padding_idx,
            vocab_size=vocabulary,
            sparse=self.sparse,
        )
        embedded = reduce_scatter(embedded, 0, rows)
        return embedded * self.embed_scale.to(self.weight.dtype) if scaled else embedded

    module.forward = types.MethodType(forward, module)


def _norm(module: nn.Module, role: Role, context: ModeContext) -> None:
    form, stream = recognise(module), context.grid.stream
    if form is None:
        raise PlanError(
            f"{context.module_name} is no norm that mode {context.mode} knows",
            got=type(module).__name__,
            expected="a LayerNorm or RMSNorm over the last dimension, with a weight",
            fix='mode="1d"',
        )
    features, samples = context.members(stream.features), context.members(stream.batch)
    _cut_features(module, context)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        bias = self._parameters.get("bias")
        return apply_norm(x, self.weight, bias, form, features, samples)

    module.forward = types.MethodType(forward, module)


def _cut_features(module: nn.Module, context: ModeContext) -> None:
    stream = context.grid.stream
    for name, param in list(module._parameters.items()):
        if param is not None:
            _check_divides(param.shape[-1], stream.features, context, "features")
            context.cutter.place(module, name, ((stream.features, Shard(param.dim() - 1)),))


def _feature_parameters(module: nn.Module, role: Role, context: ModeContext) -> None:
    """Parameters [..., features] that are added to the stream, or looked up for it."""
    _cut_features(module, context)
    sum_gradients(module, context.ranks.group(context.grid.stream.batch))
    if isinstance(module, nn.Embedding):
        _fetch(module, context)


def _fetch(module: nn.Module, context: ModeContext) -> None:
    """Give what begins the stream the inputs of the stream's samples, where attention sees others."""
    if context.grid.stream == context.grid.inner:
        return
    exchange = Exchange(context)
    module.register_forward_pre_hook(lambda module, args: (exchange(args[0]), *args[1:]))


def _patch_embedding(module: nn.Module, role: Role, context: ModeContext) -> None:
    """A convolution of whole inputs whose output channels are the stream's features."""
    stream = context.grid.stream
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) or module.groups != 1:
        raise PlanError(
            f"{context.module_name} embeds no patches", got=type(module).__name__, expected="a Conv2d"
        )
    _check_divides(module.out_channels, stream.features, context, "output channels")
    for name, param in list(module._parameters.items()):
        if param is not None:
            context.cutter.place(module, name, ((stream.features, Shard(0)),))
    sum_gradients(module, context.ranks.group(stream.batch))
    _fetch(module, context)


def _shared(module: nn.Module, role: Role, context: ModeContext) -> None:
    """Whole on every rank and applied to a part of the activations, such as a norm over a head's features."""
    sum_gradients(module, context.group)


def _replicated(module: nn.Module, role: Role, context: ModeContext) -> None:
    """Whole on every rank, and used alike on all."""


def _check_divides(size: int, axes: tuple[str, ...], context: ModeContext, what: str) -> None:
    degree = context.ranks.degree(axes)
    if size % degree:
        raise PlanError(
            f"{context.module_name}: its {what} do not divide over {' x '.join(axes)}",
            got=f"{size} {what} over {degree} ranks",
            fix='choose a degree that divides them, or mode="1d"',
        )


Apply = Callable[[nn.Module, Role, ModeContext], None]
ROLES: dict[str, Apply] = {
    "colwise": _linear,
    "packed_colwise": _linear,
    "colwise_gather_output": _linear,
    "rowwise": _linear,
    "rowwise_split_input": _linear,
    "vocab_head": _linear,
    "classifier": _linear,
    "vocab_embedding": _vocab_embedding,
    "embedding_rowwise": _vocab_embedding,
    "norm": _norm,
    "feature_embedding": _feature_parameters,
    "feature_parameters": _feature_parameters,
    "patch_embedding": _patch_embedding,
    "replicated": _replicated,
    "replicate": _replicated,
    "replicated_with_grad_allreduce": _shared,
}
"""Role to the function that gives it to a module."""
