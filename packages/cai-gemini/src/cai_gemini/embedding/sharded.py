"""A cached table cut over ranks, by rows or by columns."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from cai_gemini.embedding.cache import version
from cai_gemini.embedding.cached import CachedEmbedding, Mode, padding_row
from cai_gemini.embedding.exchange import (
    Questions,
    answer_columns,
    answer_rows,
    answer_sums,
    ask,
    send_weights,
)
from cai_mesh import rng
from cai_mesh.comm import axis_names
from cai_mesh.errors import PlanError
from cai_mesh.layout import Layout, ReduceSpec, Shard, attach

By = Literal["rows", "columns"]


class ShardedEmbedding(CachedEmbedding):
    """A `CachedEmbedding` of which each rank keeps a part, for ranks that read different batches.

    By rows: ids go to the ranks that hold their rows, which send sums of bags back (rows where there are no bags).
    Ranks hold contiguous rows, so ids numbered by frequency would all go to the first one; spread them beforehand.
    By columns: ids go to all ranks, each of which sends its columns back. The result is that of one process with all
    the batches, but for the order of sums. The gradient is the sum over all ranks' batches divided by the number of
    ranks, as DDP's is. `weight` belongs to this rank alone; DDP must be told to leave it.

    Every rank calls forward, and `prefetch`, the same number of times. The table, its state dict and
    `optimizer_state` hold this rank's part with its `Layout`, so `cai_mesh.checkpoint` saves the whole and loads it
    on any number of ranks, by rows, by columns, or whole. A row-wise state of a table cut by columns exists once a
    rank, and loads on as many ranks.

    Args:
        mesh: one-dimensional; its ranks share the table.
        num_embeddings, dim: rows and columns of the whole table.
        by: "rows" or "columns".
        mode, padding_idx, dtype: as for `CachedEmbedding`.
        frequencies: expected uses of each row of the whole table, [num_embeddings].
        weight: the whole table in host memory, of which this rank takes its part (by rows a view); None: normal
            values that depend on torch's seed and on no layout.
        options: `cache` (of this rank's part), `device`, `policy` of `CachedEmbedding`.

    Raises `PlanError` when sizes do not fit each other, the mesh has other than one dimension, or a rank would hold
    nothing.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        num_embeddings: int,
        dim: int,
        *,
        by: By = "rows",
        mode: Mode | None = None,
        padding_idx: int | None = None,
        frequencies: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        layout = _layout(mesh, num_embeddings, dim, by)
        (first, rows), (column, width) = layout.segments(0)[0], layout.segments(1)[0]
        padding = padding_row(padding_idx, num_embeddings)
        has_padding = padding is not None and first <= padding < first + rows
        if weight is None:
            part = torch.empty(rows, width, dtype=dtype, device="cpu")
            stream = rng.key(torch.initial_seed(), "embedding", num_embeddings, dim)
            rng.normal_(part, stream, layout=layout)
            if has_padding and padding is not None:
                part[padding - first] = 0
        else:
            _whole("weight", weight, (num_embeddings, dim))
            part = weight[first : first + rows, column : column + width].contiguous()
        if frequencies is not None:
            _whole("frequencies", frequencies, (num_embeddings,))
            frequencies = frequencies[first : first + rows]
        super().__init__(
            rows,
            width,
            mode=mode,
            padding_idx=padding - first if has_padding and padding is not None else None,
            frequencies=frequencies,
            weight=part,
            **options,
        )
        self.num_embeddings, self.dim, self.by, self.padding_idx = num_embeddings, dim, by, padding
        self._layout, self._first, self._group = layout, first, mesh.get_group()
        self._prefetched: dict[int, tuple[weakref.ref[torch.Tensor], int, Questions]] = {}
        attach(self._cache.table, layout)
        attach(self.weight, reduce=ReduceSpec(sum_axes=()))
        world = mesh.size()
        self.weight.register_hook(lambda gradient: gradient / world)

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look up this rank's batch, as `CachedEmbedding.forward` does. Collective.

        Raises `DataError` on every rank when one has an id outside the table. A rank whose cache is too small raises
        alone; the others fail when it leaves.
        """
        self._check_call(ids, offsets, per_sample_weights)
        questions = self._questions(ids, offsets)
        weights = None
        if per_sample_weights is not None:
            weights = send_weights(per_sample_weights.reshape(-1), questions, self._group)
        if self.mode is None:
            rows = self._serve(questions.ids, None, None, None)
            if self.by == "columns":
                rows = answer_columns(rows, self._widths(), questions, self._group)
            else:
                rows = answer_rows(rows, questions, self._group)
            return rows.view(*ids.shape, self.dim)
        if self.by == "columns":
            rows = self._serve(questions.ids, questions.offsets(), weights, self.mode)
            return answer_columns(rows, self._widths(), questions, self._group)
        sums = answer_sums(
            self._serve(questions.ids, questions.offsets(), weights, "sum"), questions, self._group
        )
        return sums / self._lengths(ids, offsets) if self.mode == "mean" else sums

    def prefetch(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> bool:
        """Bring rows ahead, as `CachedEmbedding.prefetch` does; `offsets` must be the forward's. Collective.

        Its exchange of ids waits for what the compute stream was given so far.
        """
        questions = self._ask(ids, offsets)
        key, mine = id(ids), weakref.ref(self)

        def gone(_: Any) -> None:
            module = mine()
            if module is not None:
                module._prefetched.pop(key, None)

        self._prefetched[key] = (weakref.ref(ids, gone), version(ids), questions)
        return super().prefetch(questions.ids)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return `CachedEmbedding.optimizer_state` of this rank's part."""
        state = super().optimizer_state(optimizer)
        for value in state.values():
            if isinstance(value, torch.Tensor):
                attach(value, self._state_layout(value))
        return state

    def _state_layout(self, value: torch.Tensor) -> Layout:
        step = self._layout.steps[0]
        if value.shape[1:] == self._cache.table.shape[1:]:
            return self._layout
        rows = self.num_embeddings if self.by == "rows" else step.degree * self.num_embeddings
        return Layout((rows, *value.shape[1:])).then(step.axis, step.degree, step.index, Shard(0))

    def _widths(self) -> list[int]:
        step = self._layout.steps[0]
        return [self._layout.at({step.axis: rank}).local_shape[1] for rank in range(step.degree)]

    def _questions(self, ids: torch.Tensor, offsets: torch.Tensor | None) -> Questions:
        entry = self._prefetched.pop(id(ids), None)
        if entry is not None and entry[0]() is ids and entry[1] == version(ids):
            return entry[2]
        return self._ask(ids, offsets)

    @torch.no_grad()
    def _ask(self, ids: torch.Tensor, offsets: torch.Tensor | None) -> Questions:
        device = self.weight.device
        flat = ids.reshape(-1).to(device, torch.int64)
        bags = self._bags(ids, offsets).to(device)
        count = flat.numel() if self.mode is None else len(ids if offsets is None else offsets)
        per_rank = None if self.by == "columns" else -(-self.num_embeddings // self._group.size())
        questions = ask(flat, bags, count, self.num_embeddings, self._group, rows_per_rank=per_rank)
        questions.ids.sub_(self._first)
        return questions

    def _bags(self, ids: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        """The bag of each id, int64 [T]."""
        if offsets is not None:
            places = torch.arange(len(ids), device=offsets.device)
            return torch.searchsorted(offsets.long(), places, right=True) - 1
        index = torch.arange(ids.numel(), device=ids.device)
        return index if self.mode is None else index // max(1, ids.shape[1])

    def _lengths(self, ids: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        """Ids in each bag but for the padding, at least 1; [B, 1] in the table's dtype."""
        counted = torch.ones_like(ids) if self.padding_idx is None else (ids != self.padding_idx).long()
        count = len(ids if offsets is None else offsets)
        bags = self._bags(ids, offsets).to(ids.device)
        lengths = torch.zeros(count, dtype=torch.int64, device=ids.device)
        lengths.index_add_(0, bags, counted.reshape(-1).long())
        return lengths.clamp_(min=1).to(self.weight.device, self.weight.dtype)[:, None]

    def __getstate__(self):
        raise PlanError(
            "a sharded embedding belongs to a process group and cannot be copied",
            fix="build another and load this one's state dict",
        )


def _whole(name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise PlanError(f"{name} is not of the whole table", got=tuple(value.shape), expected=shape)


def _layout(mesh: DeviceMesh, rows: int, dim: int, by: str) -> Layout:
    if mesh.ndim != 1:
        raise PlanError(
            "a table is cut along one axis",
            got=f"a mesh of {mesh.ndim} dimensions",
            fix='pass a sub-mesh, as mesh["dp_shard"]',
        )
    if by not in ("rows", "columns"):
        raise PlanError("unknown cut of a table", got=by, expected="'rows' or 'columns'")
    (axis,) = axis_names(mesh)
    shard = Shard(0 if by == "rows" else 1)
    layout = Layout((rows, dim)).then(axis, mesh.size(), mesh.get_local_rank(), shard)
    last = layout.at({axis: mesh.size() - 1}).local_shape
    if 0 in last:
        raise PlanError(
            f"a table cut by {by} leaves a rank with nothing",
            got=f"{(rows, dim)[shard.dim]} {by} over {mesh.size()} ranks",
            fix="cut it the other way or over fewer ranks",
        )
    return layout
