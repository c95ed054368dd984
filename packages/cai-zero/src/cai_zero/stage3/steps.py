"""Steps of optimizers over shards: each sees plain parameters and gradients, and nothing stays unsharded after it."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cai_mesh.gradients import ShardGradient, hide, local_gradient, show
from cai_mesh.storage import PartSteps, no_backward
from cai_zero.reduction.owner import GradientOwner
from cai_zero.reduction.ranks import RankTable


class Stepped(GradientOwner, Protocol):
    """Whoever has the shards that optimizers step."""

    ranks: RankTable

    @property
    def may_lack_gradients(self) -> bool:
        """Whether a backward may have passed over parameters that a forward was run for."""
        ...

    def stepping(self) -> None:
        """An optimizer is about to change shards."""

    def stepped(self) -> None:
        """An optimizer has changed shards."""


def follow_steps(owner: Stepped, shard_ids: Collection[int]) -> None:
    """Tell `owner`, to which it refers weakly, of the steps of all optimizers that have some of its shards.

    Raises `PlanError` in a step without any gradient, where a forward was run for some.
    """
    weak, part_steps = weakref.ref(owner), PartSteps()
    lowered = weakref.WeakSet[torch.optim.Optimizer]()

    def stepped_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        return [
            param for group in optimizer.param_groups for param in group["params"] if id(param) in shard_ids
        ]

    def steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        alive, shards = weak(), stepped_by(optimizer)
        if alive is None or not shards:
            return
        if optimizer not in lowered:
            _lower_state(optimizer, shards)
            lowered.add(optimizer)
        part_steps.check(optimizer)
        alive.ensure_gradients()
        if alive.may_lack_gradients and all(local_gradient(param) is None for param in shards):
            raise no_backward()
        alive.ranks.turns.take("a step")
        alive.stepping()
        hide(shards)

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        alive, shards = weak(), stepped_by(optimizer)
        if alive is not None and shards:
            show(shards)
            alive.stepped()

    # for good: taking one out while others run would break torch's loop over them
    register_optimizer_step_pre_hook(steps)
    register_optimizer_step_post_hook(stepped)


def _lower_state(optimizer: torch.optim.Optimizer, shards: list[nn.Parameter]) -> None:
    """Let state that an optimizer has made of whole parameters (Adagrad, when it is built) be this rank's part."""
    for param in shards:
        state = optimizer.state.get(param, {})
        for name, value in state.items():
            if isinstance(value, ShardGradient):
                state[name] = value.part
