"""Whether ranks still run the same loop: each says what it begins, and one that begins something else is told.

A rank that runs another backward, or a step, than the others makes collectives that theirs do not match: what comes of
that is a hang, an abort, or numbers that are wrong. So before those, it asks the job's store what the others began in
the same turn. Nobody waits for an answer of theirs: the first one writes it down, and the others compare.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from cai_mesh.comm.collectives import all_gather_object
from cai_mesh.errors import PlanError

_KEPT = 64
"""Turns whose entries stay in the store; a rank that is further behind is not compared."""
_PATIENCE = timedelta(seconds=60)
"""The seconds that a rank waits at most for all others in a turn that is not expected."""


class Turns:
    """The turns of the ranks of some groups.

    Args:
        groups: groups of ranks that must take the same turns; None and groups of one are left out. Collective over
            each.
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup | None]):
        self._tables: list[tuple[dist.Store, int]] = []
        self._turn, self._patience = 0, _PATIENCE
        for group in groups:
            if group is None or group.size() == 1 or dist.get_backend(group) == "fake":
                continue
            name = all_gather_object(uuid.uuid4().hex, group)[0]
            store = dist.PrefixStore(f"cai.turns.{name}", dist.distributed_c10d._get_default_store())
            self._tables.append((store, group.size()))
            kind = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
            self._patience = min(self._patience, group._get_backend(kind).options._timeout / 2)

    def take(self, what: str, *, together: bool = False) -> None:
        """Begin the next turn. One message to the store.

        Args:
            what: is begun, alike on all ranks.
            together: wait for all ranks: the turn is one that they would not guess.

        Raises `PlanError` where another rank has begun something else, or with `together` does not come.
        """
        turn, self._turn = self._turn, self._turn + 1
        for store, size in self._tables:
            mine = f"{what} (rank {dist.get_rank()})"
            first = store.compare_set(str(turn), "", mine).decode()
            if first.rpartition(" (rank ")[0] != what:
                raise _apart(mine, first)
            if together:
                self._wait(store, size, turn, mine)
            if turn >= _KEPT:
                store.delete_key(str(turn - _KEPT))

    def _wait(self, store: dist.Store, size: int, turn: int, mine: str) -> None:
        if store.add(f"{turn}.here", 1) == size:
            store.set(f"{turn}.all", "1")
        try:
            store.wait([f"{turn}.all"], self._patience)
        except (RuntimeError, ValueError) as error:
            raise _apart(mine, f"not that, within {self._patience.total_seconds():.0f} s") from error


def _apart(mine: str, other: str) -> PlanError:
    return PlanError(
        "ranks no longer run the same loop, and would wait for each other for ever",
        got=f"here: {mine}; elsewhere: {other}",
        cause="uneven numbers of batches or backwards; a step, an evaluation or a save on some ranks only; or blocks "
        "in another order",
        fix="call model, backward and step on all ranks alike (drop_last or a sampler that pads; data that decides on "
        "blocks must be the same on all)",
    )
