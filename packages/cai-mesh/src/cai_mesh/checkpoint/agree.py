"""Agreement of ranks: what one could not do, none has done. An error is raised everywhere, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from cai_mesh.comm.collectives import all_gather_object
from cai_mesh.errors import CheckpointError

T = TypeVar("T")


def control_group() -> dist.ProcessGroup | None:
    """The group of all ranks for control data; None in a job of one process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD


def agreed(
    action: Callable[[], Any], group: dist.ProcessGroup | None, *, doing: str = "write the checkpoint"
) -> list[Any]:
    """Every rank's result of `action`, which is sent to all ranks. Collective.

    If any rank failed, all raise its `CheckpointError`; another kind of error becomes one that says which rank could
    not do what `doing` says.
    """
    result, failure = None, None
    try:
        result = action()
    except CheckpointError as error:
        failure = error
    except Exception as error:  # a full disk, a missing mount
        rank = dist.get_rank() if group is not None else 0
        failure = CheckpointError(f"rank {rank} could not {doing}", cause=f"{type(error).__name__}: {error}")
    outcomes = all_gather_object((result, failure), group)
    for _, failed in outcomes:
        if failed is not None:
            raise failed
    return [value for value, _ in outcomes]


def together(
    action: Callable[[], T], group: dist.ProcessGroup | None, *, doing: str = "write the checkpoint"
) -> T:
    """This rank's own result of `action`, which stays here; raises as `agreed` does. Collective."""
    outcomes: list[T] = []
    agreed(lambda: outcomes.append(action()), group, doing=doing)
    return outcomes[0]
