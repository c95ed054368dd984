"""The state of an optimizer over pieces, which a loop asks for by the model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from cai_mesh.errors import LayoutError
from cai_mesh.gradients import Place, ShardGradient, shown
from cai_zero.replicated.keepers import ChunkKeeper


class ShownState(MutableMapping[Any, Any]):
    """State by piece, or by parameter of the model: then in the parameter's shape, of which this rank has a part.

    Args:
        state: that of the inner optimizer, by piece.
    """

    def __init__(self, state: MutableMapping[Any, Any]):
        self._state = state

    def __getitem__(self, key: Any) -> Any:
        piece = _piece_of(key)
        return self._state[key] if piece is None else _Slots(self._state[piece], piece, _place_of(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        piece = _piece_of(key)
        if piece is None:
            self._state[key] = value
        else:
            self._state[piece] = {}
            self[key].update(value)

    def __delitem__(self, key: Any) -> None:
        piece = _piece_of(key)
        del self._state[key if piece is None else piece]

    def __contains__(self, key: object) -> bool:
        piece = _piece_of(key)
        return (key if piece is None else piece) in self._state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return repr(self._state)


def _piece_of(key: Any) -> torch.Tensor | None:
    """The piece that is stepped for a parameter of the model; None for anything else."""
    keeper = getattr(key, "cai_keeper", None)
    return keeper.piece(key.cai_index) if isinstance(keeper, ChunkKeeper) else None


def _place_of(param: Any) -> Place:
    return param.cai_keeper.place(param.cai_index)


class _Slots(MutableMapping[str, Any]):
    """The state of one parameter."""

    def __init__(self, slots: MutableMapping[str, Any], piece: torch.Tensor, place: Place):
        self._slots, self._piece, self._place = slots, piece, place

    def __getitem__(self, slot: str) -> Any:
        value = self._slots[slot]
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == self._piece.shape:
            return shown(value, self._place)
        return value

    def __setitem__(self, slot: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.dim():
            if value.shape != self._place.shape:
                raise LayoutError(
                    "state of an optimizer does not have the shape of its parameter",
                    got=tuple(value.shape),
                    expected=tuple(self._place.shape),
                )
            local = value.part if isinstance(value, ShardGradient) else value.detach().flatten()
            value = local if isinstance(value, ShardGradient) else local[self._place.low : self._place.high]
            value = value.clone()
        self._slots[slot] = value

    def __delitem__(self, slot: str) -> None:
        del self._slots[slot]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return repr(self._slots)
