"""Which layers share the blocks of a request, and which the memory of a block.

A layer with a window needs the last tokens alone. So layers are put into groups of one window each, and a request has
blocks of its own in each group: those that a window has left behind go to others, of any group. For that a block is as
large in all groups: it has room in as many layers as a group has, and the n-th layers of all groups keep their keys and
values in one tensor, each in the blocks of its group (as in vLLM's hybrid cache).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

MOST_GROUPS = 16
"""The most groups: the host has tables of each to write in every step."""
SPARE = 1.125
"""The most room, beside that of the layers, that groups of one size may have."""


class LayerCache(NamedTuple):
    """The keys and values of one layer.

    Args:
        bytes: those of a token.
        form: shapes and dtypes; layers of another form do not share memory.
        window: the last tokens that are seen; None: all.
    """

    bytes: int
    form: object
    window: int | None


@dataclass(frozen=True)
class CacheLayout:
    """The groups of a model's layers.

    Args:
        windows: the window of each group; None: all tokens are seen.
        places: the group and the number in it, by the name of a layer.
        layers: layers that a block has room for.
    """

    windows: tuple[int | None, ...]
    places: Mapping[str, tuple[int, int]]
    layers: int


def one_group(names: list[str]) -> CacheLayout:
    """Return the layout of layers that all have the same blocks, none of which is left behind."""
    return CacheLayout((None,), {name: (0, number) for number, name in enumerate(names)}, len(names))


def layout_of(layers: Mapping[str, LayerCache], longest: int | None) -> CacheLayout:
    """Return the groups of a model's layers; one of all where they differ in more than windows.

    Args:
        layers: the layers by name, in their order.
        longest: tokens of the longest request; a window of as many leaves nothing behind.
    """
    windows: dict[int | None, list[str]] = {}
    for name, layer in layers.items():
        slides = layer.window is not None and (longest is None or layer.window < longest)
        windows.setdefault(layer.window if slides else None, []).append(name)
    if windows.keys() == {None} or len({layer.form for layer in layers.values()}) > 1:
        return one_group(list(layers))
    size = _group_size([len(names) for names in windows.values()])
    groups: list[int | None] = []
    places = {}
    for window, names in windows.items():
        for number, name in enumerate(names):
            places[name] = (len(groups) + number // size, number % size)
        groups += [window] * -(-len(names) // size)
    return CacheLayout(tuple(groups), places, size)


def _group_size(counts: list[int]) -> int:
    """Return the layers of a group, for so many layers of each window: few groups, and little room to spare."""

    def groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    sizes = [size for size in range(1, max(counts) + 1) if groups(size) <= MOST_GROUPS]
    close = [size for size in sizes if groups(size) * size <= SPARE * sum(counts)]
    return min(close or sizes, key=lambda size: (groups(size) if close else groups(size) * size, -size))
