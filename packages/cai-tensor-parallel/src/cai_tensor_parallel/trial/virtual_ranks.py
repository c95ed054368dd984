"""Ranks that are threads of this process, for a trial: real collectives, and no rank of the job waits for another."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 60
"""Seconds that a virtual rank waits for another; one that fails leaves at once, and the others hear of it."""
_worlds = itertools.count()


class VirtualRanks:
    """The axes as one virtual rank knows them: degrees, its indices, and groups, made when they are first asked for.

    Args:
        axes: degree by name, outermost first; all of them together are `tp`.
        rank: this one's number in row-major order.
        store: shared by all.
        world: a name no other set of virtual ranks has.
    """

    def __init__(self, axes: Mapping[str, int], rank: int, store: dist.Store, world: str) -> None:
        self.axes, self.rank, self.store, self.world = dict(axes), rank, store, world
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        remainder, self.here = rank, dict[str, int]()
        for name, degree in reversed(self.axes.items()):
            remainder, self.here[name] = divmod(remainder, degree)

    def leaves(self, axes: str | Sequence[str]) -> tuple[str, ...]:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        return tuple(name for name in self.axes if name in names or "tp" in names)

    def degree(self, axes: str | Sequence[str]) -> int:
        return math.prod(self.axes[name] for name in self.leaves(axes))

    def index(self, axes: str | Sequence[str]) -> int:
        position = 0
        for name in self.leaves(axes):
            position = position * self.axes[name] + self.here[name]
        return position

    def group(self, axes: str | Sequence[str]) -> dist.ProcessGroup | None:
        names = self.leaves(axes)
        if self.degree(names) == 1:
            return None
        if names not in self._groups:
            fixed = [f"{name}{at}" for name, at in sorted(self.here.items()) if name not in names]
            label = f"{self.world}/{'+'.join(names)}/{'.'.join(fixed)}"
            self._groups[names] = _join(
                dist.PrefixStore(label, self.store),
                self.index(names),
                self.degree(names),
                f"{label}/{self.rank}",
            )
        return self._groups[names]

    def close(self) -> None:
        """Leave all groups: ranks that wait for this one hear of it."""
        for group in self._groups.values():
            torch._C._distributed_c10d._unregister_process_group(group.group_name)
            group.abort()


def on_virtual_ranks(axes: Mapping[str, int], function: Callable[[VirtualRanks], Any]) -> list[Any]:
    """The values that `function(ranks)` returns on each rank of a mesh with these axes.

    Raises the error of the rank that failed first; the errors of others only say that it left.
    """
    store, world = dist.HashStore(), f"cai virtual {next(_worlds)}"
    count = math.prod(axes.values())
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        ranks = VirtualRanks(axes, rank, store, world)
        try:
            ranks.group("tp")
            results[rank] = function(ranks)
        except BaseException as error:
            errors.append(error)
        finally:
            ranks.close()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _join(store: dist.Store, rank: int, count: int, name: str) -> dist.ProcessGroup:
    """This thread's end of a gloo group, under a name of its own: collectives find groups of a process by name."""
    group = dist.ProcessGroup(store, rank, count)
    gloo = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(gloo)
    backend = dist.ProcessGroupGloo(store, rank, count, timedelta(seconds=SECONDS))
    group._register_backend(torch.device("cpu"), gloo, backend)
    group._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, group)
    return group
