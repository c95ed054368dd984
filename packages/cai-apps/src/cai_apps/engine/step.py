"""One forward of a batch: tokens of several requests in one row, and attention of each to the keys it has in blocks.

The model sees a row of tokens and their positions. Its attention layers write keys and values to where the step says,
and attend to what the blocks of each request have: requests of one token by a kernel that reads blocks where they are,
chunks of prompts by the kernels of training, over keys that are gathered in a row.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cai_kernels import Backend, paged_append_, paged_attention
from cai_mesh.protocols import AttentionCall, AttentionRule

PAGED_WIDTH = 256
"""The widest heads of the kernel that reads blocks where they are."""


class Part(NamedTuple):
    """The tokens of one request in a step.

    Args:
        ids: the tokens; -1 - row for the one that row `row` of the step before chooses.
        start: the position of the first.
        blocks: the request's blocks, enough for all its tokens up to these.
    """

    ids: Sequence[int]
    start: int
    blocks: array[int]

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
        slots: the places of their keys, int64 [R]: block * size + position in the block; -1: nowhere.
        lengths: the keys of each request, int32 [R].
        tables: the blocks of each, int32 [R, most].
    """

    ids: Tensor
    places: Tensor
    slots: Tensor
    lengths: Tensor
    tables: Tensor


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
        self._keys: dict[int | None, tuple[Tensor, Tensor]] = {}
        self.decodes = sum(1 for _ in itertools.takewhile(lambda part: len(part.ids) == 1, parts))

    @property
    def is_decode(self) -> bool:
        """Whether all parts have one token."""
        return self.decodes == len(self.parts)

    @cached_property
    def rows(self) -> Rows:
        """What all tokens read; tables and lengths are those of parts of one token."""
        tokens = self._put(self._tokens())  # one copy for three rows, and one for lengths and tables
        ids, places, slots = tokens
        if self._before is not None and any(part.ids[-1] < 0 for part in self.parts):
            ids = torch.where(ids < 0, self._before[(-1 - ids).clamp_min(0)], ids)
        parts = self.parts[: self.decodes]
        most = max((len(part.blocks) for part in parts), default=0)
        keys = np.zeros((1 + most) * len(parts), np.int32)
        keys[: len(parts)] = [part.end for part in parts]
        for row, part in zip(keys[len(parts) :].reshape(len(parts), most), parts, strict=True):
            row[: len(part.blocks)] = np.frombuffer(part.blocks, np.int32)
        moved = self._put(keys)
        return Rows(
            ids[None], places[None], slots, moved[: len(parts)], moved[len(parts) :].view(len(parts), most)
        )

    def _tokens(self) -> np.ndarray:
        """Return ids, positions and slots of all tokens, int64 [3, T]."""
        size, first, rest = self._size, self.parts[: self.decodes], self.parts[self.decodes :]
        ids = [part.ids[0] for part in first]
        places = [part.start for part in first]
        slots = [part.blocks[part.start // size] * size + part.start % size for part in first]
        columns = [np.array([ids, places, slots], np.int64)]
        for part in rest:
            columns.append(
                np.stack([np.array(part.ids), np.arange(part.start, part.end), self._slots(part, part.start)])
            )
        return np.concatenate(columns, 1)

    @cached_property
    def starts(self) -> Tensor:
        """Where the tokens of each part begin, and the end, int32 [1, parts + 1]."""
        return self._starts([len(part.ids) for part in self.parts])

    def keys(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the slots of all keys that are seen, int64 [K], and where each part's begin, int32 [1, parts + 1].

        Args:
            window: a layer's; keys before that of a part's first token stay out.
        """
        if window not in self._keys:
            first = [0 if window is None else max(0, part.start - window + 1) for part in self.parts]
            pairs = list(zip(self.parts, first, strict=True))
            slots = np.concatenate([self._slots(part, place) for part, place in pairs])
            self._keys[window] = self._put(slots), self._starts([part.end - place for part, place in pairs])
        return self._keys[window]

    @cached_property
    def rest(self) -> Step:
        """The parts of several tokens."""
        return Step(self.parts[self.decodes :], self._size, self._device)

    def _slots(self, part: Part, start: int) -> np.ndarray:
        places = np.arange(start, part.end)
        blocks = np.frombuffer(part.blocks, np.int32)[start // self._size :].astype(np.int64)
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


class CachedAttention:
    """The rule of one attention layer: keys and values go to blocks, and queries see those of their request.

    Args:
        blocks: number of blocks.
        block_size: tokens of each.
        rule: attention to keys in one row, of documents whose last ones are the queries'.

    Attributes:
        rows: the tensors that the forward reads.
        step: the step, where it has parts of several tokens.
    """

    def __init__(self, blocks: int, block_size: int, rule: AttentionRule):
        self._shape, self._rule = (blocks, block_size), rule
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.rows: Rows | None = None
        self.step: Step | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """[1, N, T, H], [1, Nkv, T, H] twice -> [1, N, T, H]."""
        (keys, values), rows, step = self._caches(key, value), self.rows, self.step
        assert rows is not None
        new = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        paged_append_(keys, values, *new, rows.slots, backend=_backend(keys))
        width = max(keys.shape[3], values.shape[3])
        if width > PAGED_WIDTH and step is None:
            raise RuntimeError(f"no kernel reads blocks of heads of {width} numbers")
        if width > PAGED_WIDTH and step is not None:
            return self._gathered(query, call, step)
        if step is None or step.is_decode:
            return self._paged(query, call, rows)
        if not step.decodes:
            return self._gathered(query, call, step)
        first = self._paged(query[:, :, : step.decodes], call, rows)
        return torch.cat([first, self._gathered(query[:, :, step.decodes :], call, step.rest)], 2)

    def _paged(self, query: Tensor, call: AttentionCall, rows: Rows) -> Tensor:
        """Attend with one query of each request, to its blocks where they are."""
        caches = self._keys, self._values
        scores: dict[str, Any] = {
            "scale": call.scale,
            "window": call.window,
            "softcap": call.softcap,
            "sinks": call.sinks,
        }
        scores |= {"backend": _backend(query)}
        out = paged_attention(query[0].transpose(0, 1), *caches, rows.tables, rows.lengths, **scores)  # type: ignore[arg-type]
        return out.transpose(0, 1)[None]

    def _gathered(self, query: Tensor, call: AttentionCall, step: Step) -> Tensor:
        """Attend with the queries of a step, to the keys of its requests in one row."""
        slots, starts = step.keys(call.window)
        pair = (cache.flatten(0, 1)[slots].transpose(0, 1)[None] for cache in (self._keys, self._values))  # type: ignore[union-attr]
        if len(step.parts) > 1:  # one alone is a row without boundaries, for which there are faster kernels
            call = replace(call, cu_seqlens=starts, query_cu_seqlens=step.starts)
        return self._rule(query, *pair, call)

    def free(self) -> None:
        """Free the blocks' memory."""
        self._keys = self._values = self.rows = self.step = None

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, of which each pair names one and where it goes."""
        sources, targets = zip(*pairs, strict=True)
        for cache in (self._keys, self._values):
            if cache is not None:
                cache[list(targets)] = cache[list(sources)]

    def _caches(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blocks of keys and of values, made when a layer's first keys say their shape and dtype."""
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                rows.new_empty(*self._shape, rows.shape[1], rows.shape[3]) for rows in (key, value)
            )
        return self._keys, self._values


def _backend(tensor: Tensor) -> Backend:
    """Return the backend of kernels: Triton's have no float64."""
    return "reference" if tensor.dtype == torch.float64 else "auto"
