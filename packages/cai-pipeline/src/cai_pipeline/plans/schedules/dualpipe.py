"""DualPipe-V: a forward of one stage of a rank beside a backward of the other (DeepSeek 2025, DualPipe with half the
stages, https://github.com/deepseek-ai/DualPipe).

Two stages a rank in a V. In the middle of a step every rank has pairs of a forward and a backward of different
microbatches, so that what one communicates within its layers (experts) can travel while the other computes. Here the
two follow each other: nothing else in a pass communicates and waits. Backwards are split where a rank would be idle.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from cai_mesh.errors import PlanError
from cai_pipeline.plans.actions import Action, Kind
from cai_pipeline.plans.placement import Held
from cai_pipeline.plans.schedules._arguments import check_arguments, check_v

FEWEST = 2
"""Microbatches of each rank."""


def dualpipe_v(stage_ranks: Held, microbatches: int, rank: int) -> list[Action]:
    """The compute actions of one rank.

    Args:
        stage_ranks: rank of each stage; two a rank, in a V.
        microbatches: microbatches per step, at least two for each rank.
        rank: pipeline rank.

    Raises:
        PlanError: an argument is out of range.
    """
    check_arguments("dualpipe-v", stage_ranks, microbatches, rank)
    check_v("dualpipe-v", stage_ranks)
    ranks = len(stage_ranks) // 2
    if microbatches < FEWEST * ranks:
        raise PlanError(
            'the schedule "dualpipe-v" has two microbatches or more for each rank',
            got=f"{microbatches} microbatches, {ranks} ranks",
            expected=f"at least {FEWEST * ranks}",
            fix='take more microbatches, or the schedule "zb-v", which takes any number',
        )
    after, upto = ranks - rank - 1, rank + 1
    passes = _Made(down=rank, up=len(stage_ranks) - 1 - rank)
    for _ in range(2 * after):
        passes.forward(passes.down)
    for _ in range(upto):
        passes.forward(passes.down)
        passes.forward(passes.up)
    for _ in range(after):
        passes.split(passes.up)
        passes.weights()
        passes.forward(passes.up)
    for _ in range(microbatches - 2 * ranks + upto):
        passes.forward(passes.down)
        passes.backward(passes.up)
        passes.forward(passes.up)
        passes.backward(passes.down)
    for _ in range(after):
        passes.backward(passes.up)
        passes.forward(passes.up)
        passes.backward(passes.down)
    ends = [stage for _ in range(upto) for stage in (passes.up, passes.down)]
    for number, stage in enumerate(ends):
        (passes.backward if number < upto else passes.split)(stage)
    for _ in range(after):
        passes.weights()
        passes.split(passes.down)
    while passes.waiting:
        passes.weights()
    return passes.actions


@dataclass
class _Made:
    """A rank's actions so far; every pass takes the next microbatch of its stage."""

    down: int
    up: int
    actions: list[Action] = field(default_factory=list)
    waiting: deque[Action] = field(default_factory=deque)
    _count: Counter[tuple[bool, int]] = field(default_factory=Counter)

    def forward(self, stage: int) -> None:
        self.actions.append(Action(Kind.FORWARD, stage, self._next(True, stage)))

    def backward(self, stage: int) -> None:
        self.actions.append(Action(Kind.BACKWARD, stage, self._next(False, stage)))

    def split(self, stage: int) -> None:
        """The gradient of the input; that of the weights waits."""
        m = self._next(False, stage)
        self.actions.append(Action(Kind.BACKWARD_INPUT, stage, m))
        self.waiting.append(Action(Kind.BACKWARD_WEIGHT, stage, m))

    def weights(self) -> None:
        """Add the gradient of weights that has waited longest."""
        self.actions.append(self.waiting.popleft())

    def _next(self, forward: bool, stage: int) -> int:
        self._count[forward, stage] += 1
        return self._count[forward, stage] - 1
