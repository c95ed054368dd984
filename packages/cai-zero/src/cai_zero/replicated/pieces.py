"""The pieces that the optimizer of stages 0 to 2 steps, in its `param_groups`: each parameter's part of a shard.

A loop that writes there writes to this rank's part of the (master) weights. The unsharded parameters of all ranks
follow at once: all ranks write alike, also where a part is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cai_mesh.gradients import LOOKS, Place, ShardGradient, ShownParameter
from cai_zero.replicated.chunks import Chunk
from cai_zero.replicated.keepers import ChunkKeeper


class PieceKeeper(ChunkKeeper):
    """The `GradientKeeper` of pieces: a gradient is shown as its part."""

    def place(self, index: int) -> Place:
        full_place, size = self._chunk.places[index], self._chunk.weights.pieces[index].numel()
        return replace(full_place, shape=torch.Size((size,)), low=0, high=size, local=True)

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and not isinstance(gradient, ShardGradient):
            gradient = ShardGradient(gradient.detach(), self.place(index))
        super().set_gradient(index, gradient)

    def about_to_write(self, index: int) -> None:
        """A write shows itself: see `PieceParameter`. Until the next step the values are there."""
        self._chunk.weights.join()

    @property
    def chunk(self) -> Chunk:
        """The chunk in which the pieces lie."""
        return self._chunk

    def publish(self) -> None:
        """Give all ranks what has been written. Collective."""
        owner = self._owner()
        if owner is not None:
            owner.publish(self._chunk)


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or name == "__setitem__" or "out" in kwargs


def _keepers(values: Iterable[Any]) -> dict[int, PieceKeeper]:
    """The keepers of the pieces among some values, one of each chunk, by the chunk's id."""
    keepers = (getattr(leaf, "cai_keeper", None) for leaf in values if isinstance(leaf, torch.Tensor))
    return {id(keeper.chunk): keeper for keeper in keepers if isinstance(keeper, PieceKeeper)}


def _watched(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `func`, with values that are there; publish the chunks that it has written to, and watch views."""
    if func not in LOOKS:
        for keeper in _keepers(tree_leaves((args, kwargs))).values():
            keeper.chunk.weights.join()
    with torch._C.DisableTorchFunctionSubclass():
        output = func(*args, **kwargs)
    if _writes(func, kwargs):
        for keeper in _keepers(tree_leaves((args[:1], kwargs.get("out")))).values():
            keeper.publish()
        return output
    first = args[0] if args else None
    if isinstance(output, torch.Tensor) and isinstance(first, (PieceParameter, _PieceView)):
        with torch._C.DisableTorchFunctionSubclass():
            same = output.untyped_storage()._cdata == first.untyped_storage()._cdata
        return _view(output, first.cai_keeper) if same else output
    return output


class PieceParameter(ShownParameter):
    """A piece. Within a step it is a plain parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _watched(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return _view(ShownParameter.data.__get__(self), self.cai_keeper)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        ShownParameter.data.__set__(self, value)


class _PieceView(torch.Tensor):
    """A view of a piece: what is written to it is published too."""

    cai_keeper: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _watched(func, args, kwargs or {})


def _view(tensor: torch.Tensor, keeper: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        view = tensor.as_subclass(_PieceView)
    view.cai_keeper = keeper
    return view
