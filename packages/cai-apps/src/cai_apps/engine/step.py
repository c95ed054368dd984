"""One forward of a batch: tokens of several requests in one row, and attention of each to the keys it has in blocks.

The model sees a row of tokens and their positions. Its attention layers write keys and values to where the step says,
and attend to what the blocks of each request have.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from cai_kernels import paged_attention
from cai_mesh.protocols import AttentionCall, AttentionRule

PAGED_WIDTH = 256
"""The widest heads of the kernel that reads blocks where they are."""


@dataclass(frozen=True)
class Part:
    """The tokens of one request in a step.

    Args:
        ids: the tokens.
        start: the position of the first.
        blocks: the request's blocks, enough for all its tokens up to these.
    """

    ids: Sequence[int]
    start: int
    blocks: Sequence[int]

    @property
    def end(self) -> int:
        """The position after the last, and so the number of keys that the last one sees."""
        return self.start + len(self.ids)


class Step:
    """Where a forward finds its tokens' keys, as tensors on the model's device.

    Args:
        parts: tokens of each request; those with one token come first.
        block_size: tokens of a block.
        device: the model's.
    """

    def __init__(self, parts: Sequence[Part], block_size: int, device: torch.device):
        self.parts, self._size, self._device = parts, block_size, device
        self._keys: dict[int | None, tuple[Tensor, Tensor]] = {}
        self.decodes = sum(1 for _ in itertools.takewhile(lambda part: len(part.ids) == 1, parts))

    def inputs(self) -> dict[str, Tensor]:
        """Return what the model reads: ids and positions, int64 [1, T]."""
        ids = [token for part in self.parts for token in part.ids]
        places = [place for part in self.parts for place in range(part.start, part.end)]
        return {"input_ids": self._row(ids)[None], "position_ids": self._row(places)[None]}

    @cached_property
    def slots(self) -> Tensor:
        """Where keys are written, int64 [T]: block * size + position in the block."""
        return self._row([slot for part in self.parts for slot in self._slots(part, part.start)])

    @cached_property
    def starts(self) -> Tensor:
        """Where the tokens of each request begin, and the end, int32 [1, R + 1]."""
        return self._starts([len(part.ids) for part in self.parts])

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """The blocks of the requests of one token, int32 [R, most], and their keys, int32 [R]."""
        parts = self.parts[: self.decodes]
        most = max(len(part.blocks) for part in parts)
        rows = [[*part.blocks, *[0] * (most - len(part.blocks))] for part in parts]
        lengths = [part.end for part in parts]
        return self._row(rows, torch.int32), self._row(lengths, torch.int32)

    def keys(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the slots of all keys that are seen, int64 [K], and where each request's begin, int32 [1, R + 1].

        Args:
            window: a layer's; keys before that of a request's first token stay out.
        """
        if window not in self._keys:
            first = [0 if window is None else max(0, part.start - window + 1) for part in self.parts]
            pairs = list(zip(self.parts, first, strict=True))
            slots = [slot for part, place in pairs for slot in self._slots(part, place)]
            self._keys[window] = self._row(slots), self._starts([part.end - place for part, place in pairs])
        return self._keys[window]

    def _slots(self, part: Part, start: int) -> list[int]:
        size = self._size
        return [part.blocks[place // size] * size + place % size for place in range(start, part.end)]

    def _starts(self, lengths: Sequence[int]) -> Tensor:
        return self._row([0, *itertools.accumulate(lengths)], torch.int32)[None]

    def _row(self, values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)


class CachedAttention:
    """The rule of one attention layer: keys and values go to blocks, and queries see those of their request.

    Args:
        blocks: number of blocks.
        block_size: tokens of each.
        rule: attention to keys in one row, of documents whose last ones are the queries'.
    """

    def __init__(self, blocks: int, block_size: int, rule: AttentionRule):
        self._shape, self._rule = (blocks, block_size), rule
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.step: Step | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """[1, N, T, H], [1, Nkv, T, H] twice -> [1, N, T, H]."""
        step, (keys, values) = self.step, self._caches(key, value)
        assert step is not None
        keys.flatten(0, 1)[step.slots] = key[0].transpose(0, 1)
        values.flatten(0, 1)[step.slots] = value[0].transpose(0, 1)
        if len(step.parts) == step.decodes and _reads_blocks(query, keys, values, call):
            tables, lengths = step.tables
            rows = query[0].transpose(0, 1).contiguous()
            return paged_attention(rows, keys, values, tables, lengths, scale=call.scale).transpose(0, 1)[
                None
            ]
        slots, starts = step.keys(call.window)
        pair = (cache.flatten(0, 1)[slots].transpose(0, 1)[None] for cache in (keys, values))
        return self._rule(query, *pair, replace(call, cu_seqlens=starts, query_cu_seqlens=step.starts))

    def free(self) -> None:
        """Free the blocks' memory."""
        self._keys = self._values = self.step = None

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


def _reads_blocks(query: Tensor, keys: Tensor, values: Tensor, call: AttentionCall) -> bool:
    """Return whether the kernel that reads blocks where they are computes this call."""
    plain = call.window is None and call.softcap is None and call.sinks is None and call.causal
    return query.is_cuda and plain and keys.shape == values.shape and keys.shape[-1] <= PAGED_WIDTH
