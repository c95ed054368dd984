from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_mesh.errors import PlanError
from cai_pipeline.plans.actions import SHARDING, TRANSFERS, Kind, Program, from_text
from cai_pipeline.plans.checker import check
from cai_pipeline.plans.lowering import lower
from cai_pipeline.plans.placement import Held, Placement, place
from cai_pipeline.plans.schedules import SCHEDULES, forward_only, placement_of, program
from cai_pipeline.plans.simulation import simulate

names = st.sampled_from(sorted(SCHEDULES.keys() - {"dualpipe-v"}))  # which does not take any number
CHUNKED = ("interleaved", "bfs")


def place_for(name: str, ranks: int) -> Held:
    """Where a schedule's stages lie, as few as it takes."""
    return place(ranks, 2, "v") if placement_of(name) == "v" else place(ranks)


stages = st.integers(1, 8)
microbatches = st.integers(1, 12)


@settings(deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), stages, microbatches)
def test_every_schedule_is_right_at_every_size(name: str, p: int, m: int) -> None:
    report = check(lower(program(name, place_for(name, p), m)), m)
    expected = {"gpipe": lambda s: m}.get(name, lambda s: min(p - s, m))
    assert report.peak_live == tuple(expected(stage) for stage in range(p))
    waiting = {"zb-h1": lambda s: min(s + 1, m)}.get(name, lambda s: 0)
    assert report.peak_stashed == tuple(waiting(stage) for stage in range(p))


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(CHUNKED), st.integers(1, 8), st.integers(1, 4), st.integers(1, 20))
def test_schedules_of_several_chunks_are_right_at_every_size(name: str, p: int, v: int, m: int) -> None:
    """Microbatches that divide over the ranks, and that do not."""
    peaks = check(lower(program(name, place(p, v), m)), m).peak_live
    if name == "bfs":
        assert peaks == (m,) * (p * v)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(2, 4), st.integers(1, 4))
def test_most_activations_of_interleaved_chunks(p: int, v: int, rounds: int) -> None:
    """On the first rank, p v + p - 1 in stages times microbatches; Narayanan et al. 2021, section 2.2."""
    live = most = 0
    for action in program("interleaved", place(p, v), rounds * p)[0]:
        live += 1 if action.kind is Kind.FORWARD else -1
        most = max(most, live)
    assert most == min(rounds * p * v, p * v + p - 1)


@pytest.mark.parametrize(("name", "v"), [("interleaved", 8), ("bfs", 4), ("1f1b", 1)])
def test_large_programs(name: str, v: int) -> None:
    check(lower(program(name, place(64 // v, v), 512)), 512)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 8), st.integers(1, 24))
def test_zb_v_is_right_at_every_size(p: int, m: int) -> None:
    """Also with fewer microbatches than it is made for. No rank holds more than what p microbatches keep."""
    compute = program("zb-v", place(p, 2, "v"), m)
    check(lower(compute), m)
    for actions in compute:
        held = [(a.kind is Kind.FORWARD) - (a.kind is Kind.BACKWARD_WEIGHT) for a in actions]
        assert max(accumulate(held)) <= 2 * p


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 12), st.integers(1, 24), st.sampled_from(["v-half", "v-min"]))
def test_v_half_and_v_min_are_right_at_every_size(p: int, m: int, name: str) -> None:
    """What microbatches keep, at most, up to the gradient of the input: of (p + 1) / 2, and of p / 3 + 1."""
    compute = program(name, place(p, 2, "v"), m)
    check(lower(compute), m)
    most = (p + 1) / 2 if name == "v-half" else p / 3 + 1
    for actions in compute:
        held = [(a.kind is Kind.FORWARD) - (a.kind is Kind.BACKWARD_INPUT) for a in actions]
        assert max(accumulate(held)) <= 2 * max(most, 1)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 12))
def test_dualpipe_v_is_right_from_two_microbatches_a_rank(p: int, more: int) -> None:
    """It waits as long as ZB-V, and holds half a microbatch more."""
    m = 2 * p + more
    compute = program("dualpipe-v", place(p, 2, "v"), m)
    check(lower(compute), m)
    assert simulate(compute).makespan == 6 * m + p - 1
    done = {Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1, Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: 0}
    assert max(max(accumulate(done[a.kind] for a in actions)) for actions in compute) == 2 * p + 1
    with pytest.raises(PlanError, match="two microbatches"):
        program("dualpipe-v", place(p, 2, "v"), 2 * p - 1)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from(["loop", "v"]), st.integers(1, 2))
def test_evaluation_is_right_and_holds_one_activation(p: int, m: int, placement: Placement, v: int) -> None:
    held = place(p, v, placement)
    assert check(lower(forward_only(held, m)), m, backward=False).peak_live == (1,) * (p * v)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 12))
def test_neighbours_on_one_rank_of_a_v_exchange_nothing(p: int, m: int) -> None:
    lowered = lower(program("bfs", place(p, 2, "v"), m))
    check(lowered, m)
    moved = [action for action in lowered[p - 1] if action.kind in TRANSFERS]
    assert not [action for action in moved if {action.stage, action.partner.stage} == {p - 1, p}]


def places(lowered: Program) -> list[tuple[int, int]]:
    return [(rank, position) for rank, actions in enumerate(lowered) for position in range(len(actions))]


@given(names, stages, microbatches, st.data())
@settings(max_examples=200, deadline=None)
def test_a_dropped_action_is_named(name: str, p: int, m: int, data: st.DataObject) -> None:
    lowered = lower(program(name, place_for(name, p), m))
    rank, position = data.draw(st.sampled_from(places(lowered)))
    dropped = lowered[rank].pop(position)
    with pytest.raises(PlanError) as refusal:
        check(lowered, m)
    if dropped.kind not in SHARDING:
        assert f"action {dropped} (rank {rank})" in refusal.value.what
    else:
        assert refusal.value.what.startswith(f"action {dropped.stage}")


@settings(deadline=None)
@given(names, stages, microbatches, st.data())
def test_a_repeated_action_is_named(name: str, p: int, m: int, data: st.DataObject) -> None:
    lowered = lower(program(name, place_for(name, p), m))
    rank, position = data.draw(st.sampled_from(places(lowered)))
    repeated = lowered[rank][position]
    lowered[rank].insert(position, repeated)
    with pytest.raises(PlanError, match=f"action {repeated} "):
        check(lowered, m)


@given(names, st.integers(2, 6), microbatches, st.data())
@settings(max_examples=200, deadline=None)
def test_an_action_before_its_input_is_named(name: str, p: int, m: int, data: st.DataObject) -> None:
    """Moving a backward or a send to the front of its rank breaks its dependency."""
    lowered = lower(program(name, place_for(name, p), m))
    movable = [
        (r, i)
        for r, i in places(lowered)
        if lowered[r][i].kind.name in ("BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "SEND_F", "SEND_B")
    ]
    rank, position = data.draw(st.sampled_from(movable))
    moved = lowered[rank].pop(position)
    lowered[rank].insert(0, moved)
    with pytest.raises(PlanError, match=f"action {moved} .*comes before"):
        check(lowered, m)


@settings(deadline=None)
@given(names, st.integers(2, 6), st.integers(2, 12), st.data())
def test_receives_in_another_order_than_sends_are_named(
    name: str, p: int, m: int, data: st.DataObject
) -> None:
    lowered = lower(program(name, place_for(name, p), m))
    rank = data.draw(st.integers(1, p - 1))
    first_stage = min(action.stage for action in lowered[rank])
    receives = [i for i, a in enumerate(lowered[rank]) if (a.kind, a.stage) == (Kind.RECV_F, first_stage)]
    at = data.draw(st.integers(0, len(receives) - 2))
    first, second = receives[at], receives[at + 1]
    actions = lowered[rank]
    later = actions.pop(second)
    actions.insert(first, later)
    with pytest.raises(PlanError, match=f"action {later} .*differ in order"):
        check(lowered, m)


def test_two_ranks_that_both_send_first_deadlock() -> None:
    """1F1B whose batch of transfers is split: each rank's send waits for the receive behind the other's send."""
    lowered = [
        from_text(
            "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RESHARD 0UNSHARD 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD 0REDUCE"
        ),
        from_text(
            "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RESHARD 1UNSHARD 1RECV_F1 1F1 1B1 1SEND_B1 1RESHARD 1REDUCE"
        ),
    ]
    with pytest.raises(PlanError, match=r"0SEND_F1.*deadlocks") as refusal:
        check(lowered, 2)
    assert "rank 1 waits at 1SEND_B0" in str(refusal.value)


def test_one_rank_may_hold_neighbouring_stages() -> None:
    """Three stages on two ranks: the two on one rank exchange nothing."""
    compute = [from_text("0F0 0B0"), from_text("1F0 2F0 2B0 1B0")]
    lowered = lower(compute)
    assert not any(action.kind in TRANSFERS and action.stage == 2 for action in lowered[1])
    assert check(lowered, 1).peak_live == (1, 1, 1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0F0 0B0 0UNSHARD 0RESHARD 0REDUCE", "0F0"),
        ("0UNSHARD 0F0 0REDUCE 0B0 0RESHARD", "0REDUCE"),
        ("0UNSHARD 0F0 0B0 0REDUCE", "0RESHARD"),
        ("0UNSHARD 0UNSHARD 0F0 0B0 0RESHARD 0REDUCE", "0UNSHARD"),
        ("0RESHARD 0UNSHARD 0F0 0B0 0RESHARD 0REDUCE", "0RESHARD"),
        ("0UNSHARD 0F0 0B0 0F7 0RESHARD 0REDUCE", "0F7"),
        ("0UNSHARD 0F0 0B0 0SEND_F0 0RESHARD 0REDUCE", "0SEND_F0"),
    ],
)
def test_wrong_use_of_a_stage_is_named(text: str, named: str) -> None:
    with pytest.raises(PlanError, match=f"action {named} "):
        check([from_text(text)], 1)


def test_stages_without_gaps() -> None:
    with pytest.raises(PlanError, match="gaps"):
        check([from_text("1UNSHARD 1F0 1RESHARD")], 1, backward=False)
