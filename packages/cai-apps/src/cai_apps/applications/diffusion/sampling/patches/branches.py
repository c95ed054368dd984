"""Guidance on several ranks: one half of them predicts without the prompt, the other with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cai_mesh.errors import ConfigError


@dataclass(frozen=True)
class Branches:
    """Where a rank stands among the two predictions of guidance.

    Args:
        index: 0: without the prompt, 1: with it.
        half: the ranks that make the same prediction, from the top strip to the bottom one.
        pair: the two ranks of the same strip, the one without the prompt first.
    """

    index: int
    half: dist.ProcessGroup
    pair: dist.ProcessGroup

    def own(self, conditions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's half [n, ...] of conditions [2 n, ...], of which those without a prompt come first."""
        return {name: value.chunk(2)[self.index] for name, value in conditions.items()}

    def both(self, prediction: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's prediction -> the one without the prompt and the one with it, alike on both ranks of the pair."""
        unconditional, conditional = (
            torch.empty_like(prediction, memory_format=torch.contiguous_format) for _ in range(2)
        )
        dist.all_gather([unconditional, conditional], prediction.contiguous(), group=self.pair)
        return unconditional, conditional


def open_branches(group: dist.ProcessGroup) -> Branches:
    """Two halves of a group; all of its ranks call it.

    Raises:
        ConfigError: its ranks are odd in number.
    """
    ranks, local_rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    if len(ranks) % 2:
        raise ConfigError("guidance takes two halves of the ranks", got=f"{len(ranks)} ranks")
    count = len(ranks) // 2
    index, strip = divmod(local_rank, count)
    half = _subgroup(ranks[index * count : (index + 1) * count])
    return Branches(index, half, _subgroup(ranks[strip::count]))


def _subgroup(ranks: list[int]) -> dist.ProcessGroup:
    subgroup = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(subgroup, dist.ProcessGroup)
    return subgroup
