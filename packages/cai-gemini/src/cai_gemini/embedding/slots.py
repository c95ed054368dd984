"""The rows of a table that are cached, their slots, and which leave next. Bookkeeping only: no row is copied here.

All tensors are on the cache's device and no function but `look` makes the host wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Policy = Literal["lfu", "lru"]
_NEVER = torch.iinfo(torch.int64).max
LARGEST_COUNT = (1 << 31) - 1


@dataclass(frozen=True)
class Lookup:
    """The demand of a batch of ids on the cache. Looking changes nothing.

    Args:
        ids: the batch, int64 [L], on the device.
        in_use: bool [slots], slots that this batch or an unfinished use needs.
        missing: sorted distinct rows that are not cached, int64 [M], in host memory.
        invalid: ids outside the table.
        missed: lookups, repeated ids counted, whose row is not cached.
        used: slots in use.
    """

    ids: torch.Tensor
    in_use: torch.Tensor
    missing: torch.Tensor
    invalid: int
    missed: int
    used: int

    @property
    def needed(self) -> int:
        """Slots that must exist for this batch to be served."""
        return self.used + len(self.missing)


@dataclass(frozen=True)
class Placement:
    """The slots that missing rows go to, and the rows that leave for them.

    Args:
        rows: the missing rows, int64 [M], on the device.
        slots: their slots, int64 [M].
        left_slots: slots among them whose row leaves, int64 [K].
        left_rows: those rows, int64 [K].
    """

    rows: torch.Tensor
    slots: torch.Tensor
    left_slots: torch.Tensor
    left_rows: torch.Tensor


class SlotMap:
    """The state of a cache of `slots` rows of a table of `rows` rows.

    The map from row to slot is an int32 tensor with an entry for every row of the table: one load finds a slot and
    nothing has to be sorted or probed, for 4 bytes of device memory a row (a row of 64 floats takes 256 on the host).

    Args:
        rows: rows of the table.
        slots: rows of the cache.
        policy: "lfu": the row with the smallest count leaves first, among equals the one used longest ago (Fang et
            al., arXiv:2208.05321); "lru": the row used longest ago.
        device: the cache's device.
        reserved: slot 0 never gives up its row.
    """

    def __init__(self, rows: int, slots: int, policy: Policy, device: torch.device, *, reserved: bool):
        self.rows, self.slots, self.policy, self.reserved = rows, slots, policy, reserved
        self.filled = 0
        self.slot_of = torch.full((rows + 1,), -1, dtype=torch.int32, device=device)
        self.slot_of[rows] = (
            slots  # invalid ids go to a slot past the end, which takes writes and holds nothing
        )
        self.row_of = torch.full((slots + 1,), -1, device=device)
        self.last = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.held = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.count = torch.zeros(slots + 1, dtype=torch.int64, device=device)

    def look(self, ids: torch.Tensor, floor: int) -> Lookup:
        """Return what `ids` (int64 [L]) ask for. Slots held by a use numbered `floor` or later are in use.

        The host waits once, for the missing rows and the counts together.
        """
        valid = (ids >= 0) & (ids < self.rows)
        slots = self.slot_of[torch.where(valid, ids, self.rows)]
        missing = slots < 0
        in_use = self.held >= floor
        in_use.index_fill_(0, torch.where(missing, self.slots, slots).long(), True)
        in_use[self.slots :] = False
        if self.reserved:
            in_use[:1] = True
        missing_ids = torch.where(missing, ids, self.rows).sort().values
        first = missing_ids < self.rows
        first[1:] &= missing_ids[1:] != missing_ids[:-1]
        length = ids.numel()
        report = torch.full((length + 5,), self.rows, device=ids.device)
        report.scatter_(0, torch.where(first, first.cumsum(0) + 3, length + 4), missing_ids)
        report[:4] = torch.stack([(~valid).sum(), missing.sum(), first.sum(), in_use.sum()])
        host = report.cpu()
        invalid, missed, distinct, used = host[:4].tolist()
        return Lookup(ids, in_use[: self.slots], host[4 : 4 + distinct], invalid, missed, used)

    def place(self, lookup: Lookup) -> Placement:
        """Give every missing row a slot: empty ones first, then those the policy gives up. They must suffice."""
        count = len(lookup.missing)
        key = self._priority()
        key.masked_fill_(lookup.in_use, _NEVER)
        key.masked_fill_(self.row_of[: self.slots] < 0, -1)
        slots = torch.topk(key, count, largest=False, sorted=True).indices
        leaving = max(0, count - (self.slots - self.filled))
        left_slots = slots[count - leaving :]
        left_rows = self.row_of[left_slots]
        rows = to_device(lookup.missing, self.row_of.device)
        self.put(rows, slots, left_rows)
        self.filled += count - leaving
        return Placement(rows, slots, left_slots, left_rows)

    def put(self, rows: torch.Tensor, slots: torch.Tensor, left_rows: torch.Tensor | None = None) -> None:
        """Record that `left_rows` are gone and `rows` are in `slots`, unused so far."""
        if left_rows is not None:
            self.slot_of.index_fill_(0, left_rows, -1)
        self.slot_of.index_copy_(0, rows, slots.int())
        self.row_of.index_copy_(0, slots, rows)
        self.held.index_fill_(0, slots, 0)

    def stamp(self, slots: torch.Tensor, number: int, *, hold: bool, count: bool) -> None:
        """Record use `number` of `slots` (int64 [L], repeats allowed)."""
        self.last.index_fill_(0, slots, number)
        if hold:
            self.held.index_fill_(0, slots, number)
        if count:
            self.count.index_add_(0, slots, torch.ones_like(slots))

    def cached(self, since: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, slots) of the cache, of those held by use `since` or a later one when given. The host waits."""
        chosen = self.row_of >= 0
        if since is not None:
            chosen &= self.held >= since
        slots = chosen.nonzero().flatten()
        return self.row_of[slots], slots

    def _priority(self) -> torch.Tensor:
        """int64 [slots]; the smallest leaves first."""
        last = self.last[: self.slots]
        if self.policy == "lru":
            return last.clone()
        return (self.count[: self.slots].clamp(max=LARGEST_COUNT) << 32) | last


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host` on `device`; from host memory to CUDA through page-locked memory, so that the host does not wait."""
    if host.is_cuda or device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
