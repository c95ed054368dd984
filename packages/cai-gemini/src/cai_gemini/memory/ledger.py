"""The bytes that chunks take on the device, by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from cai_mesh.errors import PlanError


@dataclass
class Ledger:
    """Bytes that chunks take on the device, by kind, and the most they ever were.

    Args:
        limit: raise where the sum passes it (None: only count).
        nbytes: bytes by kind.
    """

    limit: int | None = None
    nbytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    peak: int = 0
    recent_peak: int = 0
    changed: Callable[[], None] | None = None  # called after every change

    def change(self, kind: str, nbytes: int) -> None:
        """Add bytes (negative: give back) of `kind`. Raises `PlanError` beyond the limit, with nothing changed."""
        total = self.total + nbytes
        if self.limit is not None and nbytes > 0 and total > self.limit:
            described = ", ".join(f"{k} {v:,}" for k, v in self.nbytes.items())
            raise PlanError(
                "the device budget would be exceeded",
                got=f"{total:,} bytes ({described}, and {nbytes:,} more {kind})",
                expected=f"{self.limit:,} bytes",
            )
        self.nbytes[kind] += nbytes
        self.peak = max(self.peak, total)
        self.recent_peak = max(self.recent_peak, total)
        if self.changed is not None:
            self.changed()

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())

    def since(self) -> int:
        """The most since the last call."""
        most, self.recent_peak = self.recent_peak, self.total
        return most
