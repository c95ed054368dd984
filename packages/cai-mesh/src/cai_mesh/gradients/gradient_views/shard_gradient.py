"""The `.grad` of a parameter of whose gradient this rank has a part: reads as the whole gradient, on every rank.

Only users see one. Operators that treat elements alike run on the part. Norms, sums and the like are those of the
whole gradient, put together over the ranks. Everything else runs on the whole gradient, gathered for it; what it
writes there is written back. So reading one is collective wherever more than the part is needed: all ranks that share
the gradient must do it, as all ranks run the same loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves, tree_map

from cai_mesh.comm.collectives import all_reduce
from cai_mesh.errors import LayoutError
from cai_mesh.gradients.gradient_views.place import Place
from cai_mesh.gradients.gradient_views.reductions import REDUCTIONS
from cai_mesh.gradients.gradient_views.stage_gradient import StageGradient


class ShardGradient(torch.Tensor):
    """A gradient that is shown whole and of which `part`, 1-d, is here. Writing to it writes to the part.

    Raises `LayoutError` for norms and sums where other ranks hold more of the model.
    """

    part: torch.Tensor
    place: Place

    @staticmethod
    def __new__(cls, part: torch.Tensor, place: Place) -> ShardGradient:
        wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, place.shape, dtype=part.dtype, device=part.device
        )
        wrapper.part, wrapper.place = part, place
        return wrapper

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        share = f"{self.place.high - self.place.low} of its elements here"
        return f"ShardGradient(shape={tuple(self.shape)}, dtype={self.dtype}, {share})"

    def __deepcopy__(self, memo: dict) -> ShardGradient:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:  # type: ignore[override]
        """The whole, as torch gives it."""
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        """The whole, as torch gives it."""
        return self.whole().tolist()

    def to_local(self) -> torch.Tensor:
        """This rank's part, 1-d, as it is."""
        return self.part

    def whole(self) -> torch.Tensor:
        """All of it that is shown, in memory of its own where not all of that is here; collective then.

        Raises `LayoutError` for that of a parameter that is a shard.
        """
        if self.place.alone or self.is_here:
            return self.part.view(self.place.shape)
        if self.place.local:
            raise LayoutError(
                "the whole gradient was asked for of a parameter that is a shard",
                fix="to_local() is this rank's part; cai_zero.full_state_dict shows how parts are put together",
            )
        kind = torch.uint8 if self.dtype is torch.bool else self.dtype
        full = torch.zeros(self.place.shape.numel(), dtype=kind, device=self.device)
        full[self.place.low : self.place.high] = self.part
        all_reduce(full, self.place.shard)
        return full.to(self.dtype).view(self.place.shape)

    @property
    def is_here(self) -> bool:
        """Whether what is shown is what every rank has, of a larger gradient: tensor-parallel ranks' parts."""
        place = self.place
        return not place.local and place.shard is None and (place.low, place.high) == (0, place.shape.numel())

    def share_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor that is shaped as the whole or can be made so."""
        if self.place.local:
            return full.expand(self.place.shape).reshape(-1)
        return full.expand(self.place.shape).reshape(-1)[self.place.low : self.place.high]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in ("detach", "alias"):  # of the same part, whose writes are counted
            return ShardGradient(args[0].part, args[0].place)
        if name in REDUCTIONS:
            return REDUCTIONS[name](*args, **kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(*args)
        if name.startswith(("_foreach_", "_fused_")) and name != "_foreach_max":
            output = _each(func, args, kwargs)
        elif _treats_elements_alike(func, name) and _fits(func, args, kwargs):
            output = _on_parts(func, args, kwargs)
        else:
            output = _on_wholes(func, args, kwargs)
        for grad in _written(func, args, kwargs, ShardGradient):
            increment_version(grad.part)  # which is not counted below autograd
        return output


def shown(part: torch.Tensor, place: Place) -> torch.Tensor:
    """A part, 1-d, as the gradient a user sees: a plain tensor where nobody else has any of it."""
    if not (place.alone or place.of_a_stage) or place.local:
        return ShardGradient(part, place)
    full = part.view(place.shape).data  # no view for autograd, which would not detach it in place
    return full.as_subclass(StageGradient) if place.of_a_stage else full


class _View(torch.Tensor):
    """A view of a gathered gradient, gathered anew for each use: what is written to it is written to the part too."""

    view_: torch.Tensor
    full: torch.Tensor
    of: ShardGradient

    @staticmethod
    def __new__(cls, view: torch.Tensor, full: torch.Tensor, of: ShardGradient) -> _View:
        wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, view.shape, strides=view.stride(), dtype=view.dtype, device=view.device
        )
        wrapper.view_, wrapper.full, wrapper.of = view, full, of
        return wrapper

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.view_)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def lower(value: Any) -> Any:
            return value.view_ if isinstance(value, _View) else value

        kwargs = kwargs or {}
        for view in {
            id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _View)
        }.values():
            view.full.copy_(view.of.whole())  # somebody may have written to the gradient since
        result = func(*tree_map(lower, args), **tree_map(lower, kwargs))
        for view in _written(func, args, kwargs, _View):
            view.of.part.copy_(view.of.share_of(view.full))
            increment_version(view.of.part)
            result = view
        first = args[0] if args and isinstance(args[0], _View) else None
        if first is not None and _is_view(func):
            return tree_map(
                lambda t: _View(t, first.full, first.of) if isinstance(t, torch.Tensor) else t, result
            )
        return result


# -- what runs on the parts --------------------------------------------------------------------------------------

_ALIKE = {
    "clone", "_to_copy", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like",
    "randn_like", "copy_", "zero_", "fill_", "masked_fill_", "masked_fill", "where", "normal_", "uniform_", "lerp_",
    "nan_to_num_", "detach_",
}  # fmt: skip


def _treats_elements_alike(func: Any, name: str) -> bool:
    return name in _ALIKE or (torch.Tag.pointwise in func.tags and name != "equal")  # which torch tags so


def _shards(*values: Any) -> list[ShardGradient]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, ShardGradient)]


def _fits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether parts are all that is needed: parts of one place, written to if anything is, and nothing larger."""
    first = _shards(args, kwargs)[0]
    if any(s.place != first.place for s in _shards(args, kwargs)):
        return False
    if func._schema.is_mutable and not first.place.local and args[0] is not first:
        return False
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return all(torch.broadcast_shapes(t.shape, first.shape) == first.shape for t in tensors)


def _lowered(value: Any, first: ShardGradient) -> Any:
    if isinstance(value, ShardGradient):
        return value.part
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return first.share_of(value)
    return value


def _on_parts(func: Any, args: Any, kwargs: Any) -> Any:
    first = _shards(args, kwargs)[0]
    lower = lambda value: _lowered(value, first)  # noqa: E731
    args_, kwargs_ = tree_map(lower, args), tree_map(lower, kwargs)
    if "memory_format" in kwargs_:
        kwargs_ = {**kwargs_, "memory_format": None}
    result = func(*args_, **kwargs_)
    if func._schema.is_mutable:
        return args[0]
    return ShardGradient(result, first.place) if isinstance(result, torch.Tensor) else result


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """A list of gradients, each by itself: the parts where an operator on one would run on the part."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and a and _is_tensor(a[0])]
    columns = list(zip(*(a for a in lists if len(a) == len(lists[0])), strict=True))
    if not all(_alike(column) for column in columns):
        return _on_wholes(func, args, kwargs)

    def lower(argument: Any) -> Any:
        if not isinstance(argument, (list, tuple)) or len(argument) != len(columns):
            return argument
        return [
            _lowered(value, _shards(column)[0]) if _shards(column) else value
            for value, column in zip(argument, columns, strict=True)
        ]

    result = func(*map(lower, args), **{key: lower(value) for key, value in kwargs.items()})
    if func._schema.is_mutable or result is None:
        return None
    return [
        ShardGradient(one, _shards(column)[0].place) if _shards(column) else one
        for one, column in zip(result, columns, strict=True)
    ]


def _alike(column: Sequence[Any]) -> bool:
    """Whether what stands together in lists may be lowered: of one place, and a part is what is written to."""
    shards = _shards(column)
    if not shards:
        return True
    return (shards[0].place.local or column[0] is shards[0]) and all(
        s.place == shards[0].place for s in shards
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _unscale(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Divide by a loss scale: an overflow of one rank's part is one of all ranks."""
    parts = [g.part if isinstance(g, ShardGradient) else g for g in grads]
    torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inverse)
    for group in {
        group for grad in _shards(grads) for group in (grad.place.shard, *grad.place.sums) if group
    }:
        all_reduce(found_inf, group, op="max")


# -- everything else -----------------------------------------------------------------------------------------------


_BY_PLACE = {
    "select", "slice", "index", "index_put", "index_put_", "index_select", "index_fill", "index_fill_", "index_copy_",
    "index_add_", "gather", "scatter_", "scatter_add_",
}  # fmt: skip
"""Operators whose arguments are places in a tensor: what they mean depends on its shape."""


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _written(func: Any, args: Any, kwargs: Any, kind: type) -> list[Any]:
    """The arguments of a class that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    written: list[Any] = []
    for i, spec in enumerate(func._schema.arguments):
        if spec.alias_info is not None and spec.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(spec.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, kind)]
    return written


def _on_wholes(func: Any, args: Any, kwargs: Any) -> Any:
    for grad in _shards(args, kwargs):
        if func.namespace == "c10d" and not (grad.is_here or grad.place.alone):
            raise LayoutError(
                "a collective was asked for of a gradient of which this rank has a part",
                cause="its gradients are reduced over the data ranks already, when they are read",
                fix="leave the collective out",
            )
        if grad.place.local and (
            not grad.place.alone or func._schema.name.removeprefix("aten::") in _BY_PLACE
        ):
            raise LayoutError(
                f"{func} looks at places in a gradient that is flat, as its parameter is",
                cause="the parameter is kept as a flat shard, and so is its gradient",
                fix="grad.to_local() is what is here, flat; norms, sums and elementwise operators work as they are",
            )
    full: dict[int, torch.Tensor] = {id(s): s.whole() for s in _shards(args, kwargs)}

    def lower(value: Any) -> Any:
        return full[id(value)] if isinstance(value, ShardGradient) else value

    result = func(*tree_map(lower, args), **tree_map(lower, kwargs))
    written = _written(func, args, kwargs, ShardGradient)
    for grad in written:
        if not grad.place.alone:
            grad.part.copy_(grad.share_of(full[id(grad)]))
    if written:
        return args[0] if isinstance(args[0], torch.Tensor) else written[0]
    first = args[0] if args else None
    if isinstance(first, ShardGradient) and not first.place.alone and _is_view(func):
        full_tensor = full[id(first)]
        return tree_map(lambda t: _View(t, full_tensor, first) if isinstance(t, torch.Tensor) else t, result)
    return result
