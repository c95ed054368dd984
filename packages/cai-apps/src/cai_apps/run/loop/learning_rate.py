"""The learning rate of a step."""

from __future__ import annotations

import math

from cai_apps.config.sections import LrSchedule


def learning_rate(step: int, peak: float, schedule: LrSchedule) -> float:
    """Linear warmup to `peak` over `warmup_steps`, then half a cosine to `floor * peak` at `decay_steps`.

    `step` counts from 0, the schedule is of a resolved config; the first step of a warmup already has a rate above 0.
    """
    warmup = schedule.warmup_steps or 0
    if step < warmup:
        return peak * (step + 1) / warmup
    span = max(1, (schedule.decay_steps or 0) - warmup)
    progress = min(1.0, (step - warmup) / span)
    return peak * (schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * progress)) / 2)
