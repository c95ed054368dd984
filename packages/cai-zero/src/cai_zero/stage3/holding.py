"""Whole weights of stage 3 on every rank for a while, for forwards without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from cai_mesh.comm import all_gather_object
from cai_mesh.errors import PlanError
from cai_mesh.storage import ModuleLifecycle
from cai_zero.reduction.ranks import RankTable
from cai_zero.stage3.gathering import Gatherer


@contextlib.contextmanager
def hold(gatherer: Gatherer, lifecycle: ModuleLifecycle, ranks: RankTable) -> Iterator[None]:
    """Gather all weights once and hold them; nobody is told of forwards inside. Collective at both ends.

    Args:
        gatherer: the gatherer of a model's units.
        lifecycle: the hooks that watch the model.
        ranks: the ranks over which its weights are sharded.

    Raises:
        PlanError: a forward waits for its backward, or a rank has no room for the weights.
    """
    if lifecycle.awaits_backward:
        raise PlanError(
            "weights were to be held for inference while a forward waits for its backward",
            fix="run the backward first, or the forward under torch.no_grad()",
        )
    ranks.turns.take("weights are held for inference")
    _check_room(gatherer, ranks)
    for part in (part for unit in gatherer.units for part in unit.parts):
        part.unit.take_writes()
        part.unit.check_shard()
    with lifecycle.paused(), gatherer.all_unsharded():
        yield


def _check_room(gatherer: Gatherer, ranks: RankTable) -> None:
    """Raise PlanError on all ranks where one GPU has no room for all weights."""
    device, needed = gatherer.device, sum(unit.nbytes for unit in gatherer.units)
    if device.type != "cuda":
        return
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    for group in (ranks.of().copies, ranks.of().shard):
        free = min(all_gather_object(free, group))
    if needed > free:
        raise PlanError(
            "a GPU has no room for the whole weights of this model",
            got=f"{needed / 2**30:.1f} GiB",
            expected=f"at most {free / 2**30:.1f} GiB, which are free",
            fix="add tensor ranks, each of which holds a part of every weight",
        )
