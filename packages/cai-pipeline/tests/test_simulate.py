from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_mesh.errors import PlanError
from cai_pipeline.plans.actions import Action, Kind, from_text
from cai_pipeline.plans.lowering import lower
from cai_pipeline.plans.placement import place
from cai_pipeline.plans.schedules import SCHEDULES, placement_of, program
from cai_pipeline.plans.simulation import simulate

names = st.sampled_from(sorted(SCHEDULES.keys() - {"dualpipe-v"}))  # which does not take any number


@settings(deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 16), st.floats(0.5, 4.0))
def test_the_bubble_of_both_schedules_is_the_known_one(name: str, p: int, m: int, backward: float) -> None:
    timeline = simulate(program(name, place(p), m), {Kind.FORWARD: 1.0, Kind.BACKWARD: backward})
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.makespan == pytest.approx((m + p - 1) * (1.0 + backward))


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 16))
def test_the_time_of_zb_h1(p: int, more: int) -> None:
    """m (F + I + W) + (p - 1) (F + I - W), all alike; Qi et al. 2023, table 1."""
    m = p + more
    compute = program("zb-h1", place(p), m)
    assert simulate(compute).makespan == 3 * m + p - 1
    for rank, actions in enumerate(compute):  # what p microbatches keep, until their weight gradients
        held = [(a.kind is Kind.FORWARD) - (a.kind is Kind.BACKWARD_WEIGHT) for a in actions]
        assert max(itertools.accumulate(held)) <= p + (rank > 0), rank


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 16))
def test_zb_v_has_no_bubble_but_its_start(p: int, more: int) -> None:
    """2 m (F + I + W) + (p - 1) F of a stage, from 2 p - 1 microbatches on; Qi et al. 2023, section 6."""
    m = 2 * p - 1 + more
    timeline = simulate(program("zb-v", place(p, 2, "v"), m))
    assert timeline.makespan == 6 * m + p - 1
    for rank in range(p):  # without a pause
        spans = [span for span in timeline.spans if span.rank == rank]
        assert spans[0].start == rank
        assert spans[-1].end - rank == 6 * m


MEMORY = {  # docs/proof/pipeline.md; activations of whole microbatches on the fullest rank, and units waited
    "zb-v": {2: (2, 1), 4: (4, 3), 8: (8, 7), 16: (16, 15), 32: (32, 31), 64: (64, 63)},
    "v-half": {2: (1.5, 2), 4: (2.5, 8), 8: (4.5, 20), 16: (8.5, 44), 32: (16.5, 92), 64: (32.5, 188)},
    "v-min": {2: (1, 3), 4: (2, 11), 8: (3, 27), 16: (6, 59), 32: (11, 123), 64: (22, 251)},
}


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("p", [2, 4, 8, 16, 32, 64])
def test_memory_and_time_in_a_v(name: str, p: int) -> None:
    """Beside 1F1B, which holds p and waits 6 (p - 1) of the same units."""
    m = 4 * p
    compute = program(name, place(p, 2, "v"), m)
    held = [[(a.kind is Kind.FORWARD) - (a.kind is Kind.BACKWARD_INPUT) for a in own] for own in compute]
    most = max(max(itertools.accumulate(own)) for own in held) / 2
    assert (most, simulate(compute).makespan - 6 * m) == MEMORY[name][p]


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(2, 4), st.integers(1, 5), st.floats(0.5, 4.0))
def test_the_bubble_of_interleaved_chunks(p: int, v: int, rounds: int, backward: float) -> None:
    """(p - 1) / (v m + p - 1), and so for looped breadth first."""
    m = rounds * p
    for name in ("interleaved", "bfs"):
        timeline = simulate(program(name, place(p, v), m), {Kind.FORWARD: 1.0, Kind.BACKWARD: backward})
        assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 20))
def test_microbatches_that_do_not_divide_cost_less_than_those_that_would(p: int, v: int, m: int) -> None:
    whole = -(-m // p) * p
    found, more = (simulate(program("interleaved", place(p, v), count)).makespan for count in (m, whole))
    assert found <= more


@settings(deadline=None)
@given(names, st.integers(1, 6), st.integers(1, 8))
def test_lowering_changes_no_time(name: str, p: int, m: int) -> None:
    held = place(p, 2, "v") if placement_of(name) == "v" else place(p)
    compute = program(name, held, m)
    assert simulate(lower(compute)) == simulate(compute)


def test_transfers_delay_the_next_stage() -> None:
    assert simulate(program("gpipe", place(2), 1), transfer=0.5).makespan == 2 * 3.0 + 2 * 0.5


def test_a_slow_stage_sets_the_pace() -> None:
    def slow_middle(action: Action) -> float:
        return 3.0 if action.stage == 1 else 1.0

    assert simulate(program("1f1b", place(3), 4), slow_middle).makespan == 1 + 4 * 6.0 + 1


def test_actions_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(PlanError, match="0B0"):
        simulate([from_text("0B0 0F0")])
