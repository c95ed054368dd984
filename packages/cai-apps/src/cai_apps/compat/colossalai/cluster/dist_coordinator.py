"""Who a rank is."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from cai_apps.booster.launch import need_launch

__all__ = ["DistCoordinator"]

Group = dist.ProcessGroup | None


class DistCoordinator:
    """This rank's number, and verbs for one rank among all.

    Raises:
        ConfigError: the ranks have not been joined.
    """

    def __init__(self) -> None:
        need_launch("DistCoordinator")
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._local_rank = int(os.environ.get("LOCAL_RANK", -1))

    @property
    def rank(self) -> int:
        """This rank's number in the job."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """This rank's number on its host; -1 where no launcher has said it."""
        return self._local_rank

    def is_master(self, process_group: Group = None) -> bool:
        """Return whether this is the first rank of a group; None: of the job."""
        return dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Return whether this is the first rank of its host."""
        return self._local_rank in (0, -1)

    def is_last_process(self, process_group: Group = None) -> bool:
        """Return whether this is the last rank of a group; None: of the job."""
        return dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, msg: str, process_group: Group = None) -> None:
        """Print a line on the first rank of a group."""
        if self.is_master(process_group):
            print(msg)

    def print_on_node_master(self, msg: str) -> None:
        """Print a line on the first rank of each host."""
        if self.is_node_master():
            print(msg)

    @contextmanager
    def priority_execution(self, executor_rank: int = 0, process_group: Group = None) -> Iterator[None]:
        """A context that one rank enters first, and the others when it has left."""
        waits = dist.get_rank(process_group) != executor_rank
        if waits:
            self.block_all(process_group)
        yield
        if not waits:
            self.block_all(process_group)

    def destroy(self, process_group: Group = None) -> None:
        """Leave a group; None: the job."""
        dist.destroy_process_group(process_group)

    def block_all(self, process_group: Group = None) -> None:
        """Wait for all ranks of a group."""
        dist.barrier(process_group)

    def on_master_only(
        self, process_group: Group = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator of functions that only the first rank of a group runs."""
        first = self.is_master(process_group)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if first else None

            return call

        return decorate
