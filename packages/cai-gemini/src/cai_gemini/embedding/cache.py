"""A cache of table rows on a device: which are there, which must stay, and what happens when a batch needs others."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cai_gemini.embedding.following import STATE, Follower, make_state
from cai_gemini.embedding.rows import Pair, Rows
from cai_gemini.embedding.slots import LARGEST_COUNT, Lookup, SlotMap, to_device
from cai_mesh.comm import SideStream
from cai_mesh.errors import DataError, PlanError
from cai_mesh.protocols import CommHandle

COUNT = "count"
"""The pair that says how often rows were looked up."""


@dataclass
class CacheStats:
    """Counts of a cache since its statistics were last reset.

    Args:
        batches: batches looked up, a batch that was prefetched counted once.
        lookups: ids in them, repeats counted.
        hits: lookups whose row was cached when the batch arrived.
        fetched: rows copied to the device.
        evicted: rows that left for them.
        bytes_in: bytes copied from host tensors to the device, optimizer state included.
        bytes_out: bytes copied back.
        refused: prefetches that found no room beside the rows in use and did nothing.
    """

    batches: int = 0
    lookups: int = 0
    hits: int = 0
    fetched: int = 0
    evicted: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0

    @property
    def misses(self) -> int:
        """Lookups whose row was not cached."""
        return self.lookups - self.hits

    @property
    def hit_rate(self) -> float:
        """hits / lookups; 1 when there were none."""
        return self.hits / self.lookups if self.lookups else 1.0


class _Use:
    """A forward whose gradient has not reached the cache; it lives in the graph."""

    def __init__(self, number: int):
        self.number, self.ran = number, False

    def in_backward(self, gradient: torch.Tensor) -> None:
        self.ran = True


@dataclass
class _Ahead:
    """A batch that was prefetched: the tensor it was asked with, where its rows are, their arrival, and their use."""

    ids: weakref.ref[torch.Tensor]
    version: int
    slots: torch.Tensor
    arrival: CommHandle
    number: int

    def is_for(self, ids: torch.Tensor) -> bool:
        return self.ids() is ids and self.version == version(ids)


def version(tensor: torch.Tensor) -> int:
    """A number that changes when the tensor does; tensors made in inference mode are taken not to."""
    return 0 if tensor.is_inference() else tensor._version


def _ranks(frequencies: torch.Tensor) -> torch.Tensor:
    """Whole numbers, at least 0, in the order of `frequencies`; equal frequencies stay equal, whatever their unit."""
    if frequencies.is_floating_point() or frequencies.min() < 0 or frequencies.max() > LARGEST_COUNT:
        return torch.unique(frequencies, return_inverse=True)[1]
    return frequencies


class RowCache:
    """Keeps the rows that batches need in `weight`, and everything that belongs to a row beside it.

    Rows stay from a prefetch to its forward, from a forward to its backward, and from there, while their gradient
    waits in `weight.grad`, until somebody changes `weight`, as an optimizer's step does, or drops the gradient.

    Args:
        weight: the cache, [slots, dim].
        table: the host table [rows, dim].
        slots: the empty map of the cache.
        frequencies: host tensor [rows] of how often rows are expected ("lfu" only); None: lookups are counted.
        padding: row that stays in slot 0.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        table: torch.Tensor,
        slots: SlotMap,
        *,
        frequencies: torch.Tensor | None,
        padding: int | None,
    ):
        self.weight, self._map = weight, slots
        self.table = table
        self.padded = padding is not None
        self.stats = CacheStats()
        self._counts = slots.policy == "lfu" and frequencies is None
        self._uses = self._settled = self._clean = self._newest = 0
        self._priorities: torch.Tensor | None = None
        if slots.policy == "lfu":
            self._priorities = torch.zeros(slots.rows, dtype=torch.int64)
            if frequencies is not None:
                self._priorities.copy_(_ranks(frequencies))
        self._start()
        self._fill(frequencies, padding)

    def _start(self) -> None:
        """Make what a copy does not share with its original."""
        self._stream = SideStream(self.weight.device)
        self._rows = Rows(self._stream)
        self._rows.pairs["weight"] = Pair(self.table, self.weight.data)
        if self._priorities is not None:
            self._rows.pairs[COUNT] = Pair(self._priorities, self._map.count, written=self._counts)
        self._follower = Follower(self.weight, self._rows, self._map, self._stream)
        self._seen = self.weight._version
        self._open: weakref.WeakSet[_Use] = weakref.WeakSet()
        self._ahead: dict[int, _Ahead] = {}
        mine = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            cache = mine()
            if cache is not None:
                for use in [use for use in cache._open if use.ran]:
                    cache._open.discard(use)

        self.weight.register_post_accumulate_grad_hook(accumulated)

    def _fill(self, frequencies: torch.Tensor | None, padding: int | None) -> None:
        """Cache the padding row and the most frequent rows."""
        first = [padding] if padding is not None else []
        rows = torch.tensor(first, dtype=torch.int64)
        if frequencies is not None:
            hot = torch.topk(frequencies, min(self._map.slots + 1, self._map.rows)).indices
            rows = torch.cat([rows, hot[~torch.isin(hot, rows)]])[: self._map.slots]
        self._stream.wait_for_compute()  # which has made the books and the cache
        if not len(rows):
            return
        with self._stream.work():
            slots = torch.arange(len(rows), device=self.weight.device)
            self._map.put(to_device(rows, self.weight.device), slots)
            self._rows.fetch(rows, slots)
        self._stream.join()
        self._map.filled = len(rows)

    @torch.no_grad()
    def prefetch(self, ids: torch.Tensor) -> bool:
        """Start bringing the rows of `ids`; False, and nothing done, when there is no room beside the rows in use."""
        self._notice()
        if id(ids) in self._ahead and self._ahead[id(ids)].is_for(ids):
            return True
        lookup = self._look(ids)
        if lookup.needed > self._map.slots:
            self.stats.refused += 1
            return False
        slots = self._bring(lookup, hold=True)
        key, mine = id(ids), weakref.ref(self)

        def gone(_: Any) -> None:
            cache = mine()
            if cache is not None:
                cache._ahead.pop(key, None)

        arrival = self._stream.mark()
        self._ahead[key] = _Ahead(weakref.ref(ids, gone), version(ids), slots, arrival, self._uses)
        return True

    @torch.no_grad()
    def acquire(self, ids: torch.Tensor, training: bool) -> tuple[torch.Tensor, int]:
        """Slots (int64 [L]) of a batch whose rows the compute stream finds in the cache, and the number of the use."""
        self._notice()
        ahead = self._ahead.pop(id(ids), None)
        if ahead is not None and ahead.is_for(ids):
            slots, arrival = ahead.slots, ahead.arrival
            self._stamp(slots, hold=training, count=False)
        else:
            lookup = self._look(ids)
            if lookup.needed > self._map.slots:
                raise self._too_small(lookup)
            slots = self._bring(lookup, hold=training)
            arrival = self._stream.mark()
        arrival.wait()
        if slots.is_cuda:
            slots.record_stream(torch.cuda.current_stream(slots.device))  # they were made on the other
        return slots, self._uses

    def _look(self, ids: torch.Tensor) -> Lookup:
        if ids.is_cuda:
            self._stream.wait_for_compute()
            self._stream.keep(ids)
        with self._stream.work():
            flat = to_device(ids.reshape(-1), self.weight.device).long()
            lookup = self._map.look(flat, self._settled + 1)
        if lookup.invalid:
            raise DataError(
                "ids outside the embedding table",
                got=f"{lookup.invalid} of {ids.numel()} ids, smallest {int(ids.min())}, largest {int(ids.max())}",
                expected=f"0 to {self._map.rows - 1}",
            )
        return lookup

    def _bring(self, lookup: Lookup, *, hold: bool) -> torch.Tensor:
        stats = self.stats
        if len(lookup.missing):
            self._stream.wait_for_compute()
            changed = self._newest >= self._clean
            leaving = [p for n, p in self._rows.pairs.items() if p.written and (changed or n == COUNT)]
            with self._stream.work():
                placed = self._map.place(lookup)
                bytes_in, bytes_out = self._rows.exchange(placed, lookup.missing, leaving)
            stats.bytes_in, stats.bytes_out = stats.bytes_in + bytes_in, stats.bytes_out + bytes_out
            stats.fetched, stats.evicted = (
                stats.fetched + len(lookup.missing),
                stats.evicted + len(placed.left_rows),
            )
        with self._stream.work():
            slots = self._map.slot_of[lookup.ids].long()
        self._stamp(slots, hold=hold, count=self._counts)
        stats.batches, stats.lookups = stats.batches + 1, stats.lookups + lookup.ids.numel()
        stats.hits += lookup.ids.numel() - lookup.missed
        return slots

    def opened(self, output: torch.Tensor, number: int) -> None:
        """Hold the rows of use `number` until the backward of `output` has run or its graph is gone."""
        use = _Use(number)
        output.register_hook(use.in_backward)
        self._open.add(use)

    def _stamp(self, slots: torch.Tensor, *, hold: bool, count: bool) -> None:
        """Number a new use of `slots`; held ones stay until their gradient has been used."""
        self._uses += 1
        if hold:
            self._newest = self._uses
        with self._stream.work():
            self._map.stamp(slots, self._uses, hold=hold, count=count)

    def _notice(self) -> None:
        """Learn what happened outside since the last call: tables written, an optimizer's step, gradients dropped."""
        rewritten = [pair for pair in self._rows.pairs.values() if pair.rewritten]
        if rewritten:
            self._stream.wait_for_compute()
            with self._stream.work():
                self._rows.finish()
                rows, slots = self._map.cached()
                self._rows.fetch(rows.cpu(), slots, rewritten)
            self._stream.join()
            for pair in rewritten:
                pair.seen()
        self._follower.refresh()
        if self.weight._version != self._seen or self.weight.grad is None:
            self._seen = self.weight._version
            self._settle()

    def _settle(self) -> None:
        """Let go of the rows whose gradients were used, but for what waits for a backward or was prefetched."""
        self._settled = min([self._uses, *(use.number - 1 for use in self._open)])
        for ahead in self._ahead.values():
            if ahead.number <= self._settled:
                self._stamp(ahead.slots, hold=True, count=False)
                ahead.number = self._uses

    def flush(self) -> int:
        """Copy every changed row back to the host; rows stay cached. Returns how many there were. The host waits."""
        self._notice()
        self._stream.wait_for_compute()
        with self._stream.work():
            rows, slots = self._map.cached(since=self._clean)
            pairs = [pair for name, pair in self._rows.pairs.items() if name != COUNT]
            if len(rows):
                self.stats.bytes_out += self._rows.give_back(rows, slots, pairs)
            self._rows.finish()
        self._clean = self._settled + 1
        return len(rows)

    def _too_small(self, lookup: Lookup) -> PlanError:
        distinct = int(torch.unique(lookup.ids).numel())
        occupied = lookup.needed - distinct
        return PlanError(
            "the cache of an embedding is too small for a batch",
            got=f"{self._map.slots} rows",
            expected=f"at least {lookup.needed}: {distinct} distinct rows of the batch"
            + (f" and {occupied} held by unfinished uses" if occupied else ""),
            cause="rows stay until the optimizer has stepped on their gradients" if occupied else "",
            fix="raise `cache`, or lower the batch size"
            + (", the micro-batches of a step or the look-ahead" if occupied else ""),
        )

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Host tensors of the state of every row, up to date, and counters as numbers."""
        self._notice()
        if not self._follower.meet(optimizer):
            raise PlanError(
                "the optimizer does not hold this embedding's parameter", got=type(optimizer).__name__
            )
        make_state(optimizer, self.weight)
        self._seen = self.weight._version
        self.flush()
        host = {
            n.removeprefix(STATE): pair.host for n, pair in self._rows.pairs.items() if n.startswith(STATE)
        }
        state = optimizer.state.get(self.weight, {})
        for key, value in state.items():
            if key not in host and isinstance(value, torch.Tensor | int | float):
                host[key] = value.item() if isinstance(value, torch.Tensor) else value
        return host

    @torch.no_grad()
    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        """Put back what `optimizer_state` gave."""
        present = self.optimizer_state(optimizer)
        shapes = [{n: getattr(v, "shape", ()) for n, v in which.items()} for which in (present, values)]
        if shapes[0] != shapes[1]:
            raise PlanError(
                "this is the state of another optimizer or table", got=shapes[1], expected=shapes[0]
            )
        state = optimizer.state[self.weight]
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                if value is not present[key]:
                    present[key].copy_(value)
            elif isinstance(state[key], torch.Tensor):
                state[key].fill_(value)
            else:
                state[key] = type(state[key])(value)

    def nbytes(self) -> int:
        """Device bytes of the cache and its books."""
        books = (self._map.slot_of, self._map.row_of, self._map.last, self._map.held, self._map.count)
        return self.weight.nbytes + sum(tensor.nbytes for tensor in books)

    def __getstate__(self):
        self.flush()
        transient = ("_stream", "_rows", "_follower", "_open", "_ahead", "weight", "table")
        return {name: value for name, value in self.__dict__.items() if name not in transient}

    def revive(self, weight: nn.Parameter, table: torch.Tensor) -> None:
        """Complete a copy, given the copies of its weight and its table."""
        self.weight, self.table = weight, table
        self._start()
        self._stream.wait_for_compute()
