"""The learning rate of a step."""

from __future__ import annotations

import math

from cai_apps.config.sections import LrSchedule


def learning_rate(step: int, peak: float, schedule: LrSchedule) -> float:
    """Linear warmup to `peak` over `warmup_steps`, then half a cosine to `floor * peak` at `decay_steps`.

    `step` counts from 0; the first step of a warmup already has a rate above 0.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    span = max(1, (schedule.decay_steps or 0) - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    return peak * (schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * progress)) / 2)
