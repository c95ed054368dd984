from __future__ import annotations

import pytest

from cai_apps.config.sections import LrSchedule
from cai_apps.run.loop.learning_rate import learning_rate

SCHEDULE = LrSchedule(warmup_steps=4, decay_steps=12, floor=0.1)


def test_warmup_is_linear_and_reaches_the_peak():
    assert [learning_rate(step, 1.0, SCHEDULE) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_passes_the_middle_and_stays_at_the_floor():
    assert learning_rate(8, 1.0, SCHEDULE) == pytest.approx(0.55)
    assert learning_rate(12, 1.0, SCHEDULE) == pytest.approx(0.1)
    assert learning_rate(99, 1.0, SCHEDULE) == pytest.approx(0.1)


def test_no_warmup_starts_at_the_peak():
    assert learning_rate(0, 2.0, LrSchedule(warmup_steps=0, decay_steps=10)) == 2.0
