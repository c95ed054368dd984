"""Ranks that are threads of this process, for a trial: real collectives, and no rank of the job waits for another."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 60
"""How long a virtual rank waits for another; one that fails leaves at once, and the others hear of it."""
_worlds = itertools.count()


def on_virtual_ranks(count: int, function: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
    """What `function(group)` returns on each of `count` ranks.

    Raises the error of the rank that failed first; the errors of others only say that it left.
    """
    store, world = dist.HashStore(), next(_worlds)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        group = _join(store, rank, count, f"cai virtual {world}.{rank}")
        try:
            results[rank] = function(group)
        except BaseException as error:
            errors.append(error)
        finally:
            torch._C._distributed_c10d._unregister_process_group(group.group_name)
            group.abort()

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
