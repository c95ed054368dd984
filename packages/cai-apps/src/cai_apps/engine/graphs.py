"""CUDA graphs of forwards in which each request has one token: one launch in place of some hundred.

A graph is of a number of rows. A batch of fewer is computed in the next larger one, whose further rows write nowhere
and see no key. The tables of blocks have room for the longest request, so that one graph serves requests that grow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cai_apps.engine.step import Rows

SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 513, 32))
"""Numbers of rows that graphs are made of."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class DecodeGraphs:
    """The graphs of a model, made when a batch first asks for one.

    Args:
        forward: computes logits [1, R, V] of rows.
        requests: the most rows of a batch.
        most: the most blocks of a request in a group of layers.
        groups: groups of layers.
        device: the model's, a GPU.

    Attributes:
        refusal: the reason that forwards of this model cannot be captured; None: they can, as far as is known.
    """

    def __init__(
        self, forward: Callable[[Rows], Tensor], requests: int, most: int, groups: int, device: torch.device
    ):
        self._forward, self.refusal = forward, None
        rows = next((size for size in SIZES if size >= requests), requests)
        self._rows = Rows(
            torch.zeros(1, rows, dtype=torch.int64, device=device),
            torch.zeros(1, rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            tuple(torch.full((rows,), -1, dtype=torch.int64, device=device) for _ in range(groups)),
            tuple(torch.zeros(rows, most, dtype=torch.int32, device=device) for _ in range(groups)),
        )
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def logits(self, rows: Rows) -> Tensor | None:
        """Return logits [R, V], which the next call writes over; None where forwards cannot be captured."""
        count = len(rows.lengths)
        size = next((size for size in SIZES if size >= count), self._rows.lengths.numel())
        if self.refusal is None and size not in self._captured:
            self._capture(size)
        if self.refusal is not None:
            return None
        self._fill(rows, count, size)
        captured = self._captured[size]
        captured.graph.replay()
        return captured.logits[0, :count]

    def forget(self) -> None:
        """Forget all graphs, as where the cache or the weights that they read are somewhere else from now on."""
        if self._captured:
            torch.cuda.synchronize()  # one may be running
            self._captured.clear()
            self._pool = torch.cuda.graph_pool_handle()  # that of no graph is not used again

    def _fill(self, rows: Rows, count: int, size: int) -> None:
        fixed = self._rows
        fixed.ids[:, :count] = rows.ids
        fixed.places[:, :count] = rows.places
        fixed.lengths[:count] = rows.lengths
        fixed.lengths[count:size] = 0
        for slots, tables, new_slots, new_tables in zip(
            fixed.slots, fixed.tables, rows.slots, rows.tables, strict=True
        ):
            slots[:count] = new_slots
            slots[count:size] = -1
            tables[:count, : new_tables.shape[1]] = new_tables

    def _capture(self, size: int) -> None:
        fixed = self._rows
        for slots in fixed.slots:
            slots[:size] = -1
        fixed.lengths[:size] = 0
        rows = Rows(
            fixed.ids[:, :size],
            fixed.places[:, :size],
            fixed.lengths[:size],
            tuple(slots[:size] for slots in fixed.slots),
            tuple(tables[:size] for tables in fixed.tables),
        )
        graph = torch.cuda.CUDAGraph()
        try:
            self._forward(rows)  # kernels are compiled, and libraries choose theirs
            with torch.cuda.graph(graph, pool=self._pool):
                logits = self._forward(rows)
        except RuntimeError as error:  # a part of the model waits for the GPU, or needs the step on the host
            self.refusal = (str(error).splitlines() or [""])[0]
            warnings.warn(f"no CUDA graph of this model, which is slower: {self.refusal}", stacklevel=2)
            return
        self._captured[size] = _Captured(graph, logits)
