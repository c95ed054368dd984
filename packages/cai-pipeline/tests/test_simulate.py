from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_mesh.errors import PlanError
from cai_pipeline.actions import Action, Kind, from_text
from cai_pipeline.lower import lower
from cai_pipeline.schedules import SCHEDULES, program
from cai_pipeline.simulate import simulate

names = st.sampled_from(sorted(SCHEDULES))


@settings(deadline=None)
@given(names, st.integers(1, 8), st.integers(1, 16), st.floats(0.5, 4.0))
def test_the_bubble_of_both_schedules_is_the_known_one(name: str, p: int, m: int, backward: float) -> None:
    timeline = simulate(program(name, p, m), {Kind.FORWARD: 1.0, Kind.BACKWARD: backward})
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.makespan == pytest.approx((m + p - 1) * (1.0 + backward))


@settings(deadline=None)
@given(names, st.integers(1, 6), st.integers(1, 8))
def test_lowering_changes_no_time(name: str, p: int, m: int) -> None:
    compute = program(name, p, m)
    assert simulate(lower(compute)) == simulate(compute)


def test_transfers_delay_the_next_stage() -> None:
    assert simulate(program("gpipe", 2, 1), transfer=0.5).makespan == 2 * 3.0 + 2 * 0.5


def test_a_slow_stage_sets_the_pace() -> None:
    def slow_middle(action: Action) -> float:
        return 3.0 if action.stage == 1 else 1.0

    assert simulate(program("1f1b", 3, 4), slow_middle).makespan == 1 + 4 * 6.0 + 1


def test_actions_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(PlanError, match="0B0"):
        simulate([from_text("0B0 0F0")])
