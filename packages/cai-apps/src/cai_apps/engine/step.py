"""One forward of a batch: tokens of several requests in one row, and attention of each to the keys it has in blocks.

The model sees a row of tokens and their positions. Its attention layers write keys and values to where the step says,
and attend to what the blocks of each request have: requests of one token by a kernel that reads blocks where they are,
chunks of prompts over keys that are gathered in a row, by kernels that need no plan for a length that is new.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cai_kernels import Backend, paged_append_, paged_attention, prompt_attention
from cai_mesh.protocols import AttentionCall, AttentionRule

PAGED_WIDTH = 256
"""The widest heads of the kernel that reads blocks where they are."""


class Part(NamedTuple):
    """The tokens of one request in a step.

    Args:
        ids: the tokens; -1 - row for the one that row `row` of the step before chooses.
        start: the position of the first.
        blocks: the request's blocks in each group of layers, enough for all its tokens up to these; where a window
            has left one behind, any.
    """

    ids: Sequence[int]
    start: int
    blocks: Sequence[array[int]]

    @property
    def end(self) -> int:
        """The position after the last, and so the number of keys that the last one sees."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Rows:
    """What a forward of requests of one token reads, of any number R of them.

    Args:
        ids: the tokens, int64 [1, R].
        places: their positions, int64 [1, R].
        lengths: the keys of each request, int32 [R].
        slots: the places of their keys in each group of layers, int64 [R]: block * size + position in the block; -1:
            nowhere.
        tables: the blocks of each request in each group, int32 [R, most].
    """

    ids: Tensor
    places: Tensor
    lengths: Tensor
    slots: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]


class Step:
    """Where a forward finds its tokens' keys, as tensors on the model's device.

    Args:
        parts: tokens of each request; those with one token come first.
        block_size: tokens of a block.
        device: the model's.
        before: the tokens that the step before chose, int64 [R], where parts name some.

    Attributes:
        decodes: parts of one token, the first ones.
    """

    def __init__(
        self, parts: Sequence[Part], block_size: int, device: torch.device, before: Tensor | None = None
    ):
        self.parts, self._size, self._device, self._before = parts, block_size, device, before
        self._groups = len(parts[0].blocks) if parts else 1
        self._keys: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}
        self.decodes = sum(1 for _ in itertools.takewhile(lambda part: len(part.ids) == 1, parts))

    @property
    def is_decode(self) -> bool:
        """Whether all parts have one token."""
        return self.decodes == len(self.parts)

    @cached_property
    def rows(self) -> Rows:
        """What all tokens read; tables and lengths are those of parts of one token."""
        ids, places, *slots = self._put(
            self._tokens()
        )  # one copy for all of these, and one for lengths and tables
        if self._before is not None and any(part.ids[-1] < 0 for part in self.parts):
            ids = torch.where(ids < 0, self._before[(-1 - ids).clamp_min(0)], ids)
        parts = self.parts[: self.decodes]
        most = max((len(part.blocks[0]) for part in parts), default=0)
        keys = np.zeros((1 + self._groups * most) * len(parts), np.int32)
        keys[: len(parts)] = [part.end for part in parts]
        tables = keys[len(parts) :].reshape(self._groups, len(parts), most)
        for group, table in enumerate(tables):
            for row, part in zip(table, parts, strict=True):
                row[: len(part.blocks[group])] = np.frombuffer(part.blocks[group], np.int32)
        moved = self._put(keys)
        tables_there = moved[len(parts) :].view(self._groups, len(parts), most)
        return Rows(ids[None], places[None], moved[: len(parts)], tuple(slots), tuple(tables_there))

    def _tokens(self) -> np.ndarray:
        """Return ids, positions and the slots of each group, of all tokens, int64 [2 + groups, T]."""
        size, first, rest = self._size, self.parts[: self.decodes], self.parts[self.decodes :]
        rows = [[part.ids[0] for part in first], [part.start for part in first]]
        for group in range(self._groups):
            rows.append([part.blocks[group][part.start // size] * size + part.start % size for part in first])
        columns = [np.array(rows, np.int64)]
        for part in rest:
            slots = [self._slots(part, part.start, group) for group in range(self._groups)]
            columns.append(np.stack([np.array(part.ids), np.arange(part.start, part.end), *slots]))
        return np.concatenate(columns, 1)

    @cached_property
    def starts(self) -> Tensor:
        """Where the tokens of each part begin, and the end, int32 [1, parts + 1]."""
        return self._starts([len(part.ids) for part in self.parts])

    def keys(self, group: int, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the slots of all keys that are seen, int64 [K], and where each part's begin, int32 [1, parts + 1].

        Args:
            group: the group of a layer.
            window: the layer's; keys before that of a part's first token stay out.
        """
        if (group, window) not in self._keys:
            first = [0 if window is None else max(0, part.start - window + 1) for part in self.parts]
            pairs = list(zip(self.parts, first, strict=True))
            slots = np.concatenate([self._slots(part, place, group) for part, place in pairs])
            starts = self._starts([part.end - place for part, place in pairs])
            self._keys[group, window] = self._put(slots), starts
        return self._keys[group, window]

    @cached_property
    def rest(self) -> Step:
        """The parts of several tokens."""
        return Step(self.parts[self.decodes :], self._size, self._device)

    def _slots(self, part: Part, start: int, group: int) -> np.ndarray:
        places = np.arange(start, part.end)
        blocks = np.frombuffer(part.blocks[group], np.int32)[start // self._size :].astype(np.int64)
        return blocks[places // self._size - start // self._size] * self._size + places % self._size

    def _starts(self, lengths: Sequence[int]) -> Tensor:
        return self._put(np.array([0, *itertools.accumulate(lengths)], np.int32))[None]

    def _put(self, values: np.ndarray) -> Tensor:
        return on_device(values, self._device)


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device, which the host does not wait for."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, which may still be under way."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Slab:
    """Keys and values of all blocks, in one layer of each group.

    Args:
        blocks: number of blocks.
        size: tokens of each.
    """

    def __init__(self, blocks: int, size: int):
        self._shape = (blocks, size)
        self._caches: tuple[Tensor, Tensor] | None = None

    def of(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the caches, [blocks, size, Nkv, H] each, made when a layer's first keys say their shape and dtype."""
        if self._caches is None:
            keys, values = (
                rows.new_empty(*self._shape, rows.shape[1], rows.shape[3]) for rows in (key, value)
            )
            self._caches = keys, values
        return self._caches

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all blocks, which a layer has written to."""
        assert self._caches is not None
        return self._caches

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, of which each pair names one and where it goes."""
        sources, targets = zip(*pairs, strict=True)
        for cache in self._caches or ():
            cache[list(targets)] = cache[list(sources)]

    def free(self) -> None:
        """Free the blocks' memory."""
        self._caches = None


class CachedAttention:
    """The rule of one attention layer: keys and values go to blocks, and queries see those of their request.

    Args:
        slab: the memory of the layer's keys and values.
        group: the group of the layer.
        rule: attention to keys in one row, of documents whose last ones are the queries'.

    Attributes:
        rows: the tensors that the forward reads.
        step: the step, where it has parts of several tokens.
        instead: a function of the rule and of what it is asked, called in its place, as while a forward is captured.
    """

    def __init__(self, slab: Slab, group: int, rule: AttentionRule):
        self._slab, self._group, self._rule = slab, group, rule
        self.rows: Rows | None = None
        self.step: Step | None = None
        self.instead: Callable[..., Tensor] | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """[1, N, T, H], [1, Nkv, T, H] twice -> [1, N, T, H]."""
        if self.instead is not None:
            return self.instead(self, query, key, value, call)
        assert self.rows is not None
        self.write(key, value, self.rows.slots)
        parts = self.attend(query, call)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def write(self, key: Tensor, value: Tensor, slots: Sequence[Tensor]) -> None:
        """Write keys and values [1, Nkv, T, H] to the slots of the layer's group, of all groups' [T]."""
        caches = self._slab.of(key, value)
        new = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        paged_append_(*caches, *new, slots[self._group], backend=_backend(caches[0]))

    def attend(self, query: Tensor, call: AttentionCall) -> list[Tensor]:
        """Attend to what blocks have: [1, N, T, H] -> [1, N, t, H] of requests of one token, and of the others."""
        caches, rows, step = self._slab.caches, self.rows, self.step
        assert rows is not None
        width = max(cache.shape[3] for cache in caches)
        if width > PAGED_WIDTH and step is None:
            raise RuntimeError(f"no kernel reads blocks of heads of {width} numbers")
        if step is not None and (width > PAGED_WIDTH or not step.decodes):
            return [self._gathered(query, call, step, caches)]
        if step is None or step.is_decode:
            return [self._paged(query, call, rows, caches)]
        first = self._paged(query[:, :, : step.decodes], call, rows, caches)
        return [first, self._gathered(query[:, :, step.decodes :], call, step.rest, caches)]

    def _paged(self, query: Tensor, call: AttentionCall, rows: Rows, caches: tuple[Tensor, Tensor]) -> Tensor:
        """Attend with one query of each request, to its blocks where they are."""
        scores: dict[str, Any] = {
            "scale": call.scale,
            "window": call.window,
            "softcap": call.softcap,
            "sinks": call.sinks,
        }
        scores |= {"backend": _backend(query)}
        out = paged_attention(
            query[0].transpose(0, 1), *caches, rows.tables[self._group], rows.lengths, **scores
        )
        return out.transpose(0, 1)[None]

    def _gathered(
        self, query: Tensor, call: AttentionCall, step: Step, caches: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attend with the queries of a step, to the keys of its requests in one row."""
        slots, starts = step.keys(self._group, call.window)
        pair = (cache.flatten(0, 1)[slots].transpose(0, 1)[None] for cache in caches)
        if len(step.parts) > 1:
            call = replace(call, cu_seqlens=starts, query_cu_seqlens=step.starts)
        elif call.mask is None and call.sinks is None and call.softcap is None:
            return prompt_attention(query, *pair, scale=call.scale, window=call.window)
        return self._rule(query, *pair, call)


def _backend(tensor: Tensor) -> Backend:
    """Return the backend of kernels: Triton's have no float64."""
    return "reference" if tensor.dtype == torch.float64 else "auto"
