"""Plans and moves: no chunk is used while offloaded and no budget passed, over random traces; Belady; the search."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import RATES, palindrome, problems

from cai_gemini.chunk.states import TABLE, Event, State, follow
from cai_gemini.memory.ledger import Ledger
from cai_gemini.planning.policy import Plan, Sizes, decide, fits, fractions, on_device, room, smallest_budget
from cai_gemini.planning.simulation import Step, best_plan, floor, simulate
from cai_gemini.planning.trace import Trace
from cai_mesh.errors import PlanError


def run(trace: Trace, sizes, plan: Plan, budget: int, *, start=()):
    """Follow `decide` through a pass; returns the chunks brought, in order."""
    present, left, brought = set(start), room(trace, sizes, plan, budget), []
    for moment, use in enumerate(trace.uses):
        moves = decide(trace, moment, present, sizes, plan, left)
        assert set(moves.free) <= present and use.chunk not in moves.free
        present -= set(moves.free)
        assert not set(moves.bring) & (present | plan.weights)
        present |= set(moves.bring)
        brought += moves.bring
        assert use.chunk in present or use.chunk in plan.weights, "used while it is offloaded"
        assert sum(sizes[c].weights for c in present) <= left[moment], "over the budget"
    return brought


@settings(deadline=None, max_examples=80)
@given(problems())
def test_no_chunk_is_used_while_away_and_no_budget_passed(problem):
    trace, sizes, budget, plan = problem
    run(trace, sizes, Plan(frozenset()), budget)
    if fits(trace, sizes, plan, budget):
        run(trace, sizes, plan, budget)
    found = best_plan(trace, sizes, budget, RATES, Step([s.state for s in sizes]))
    assert fits(trace, sizes, found, budget)
    run(trace, sizes, found, budget)


@settings(deadline=None, max_examples=80)
@given(problems(), st.sets(st.integers(0, 5)))
def test_nor_when_chunks_are_there_already(problem, there):
    trace, sizes, budget, _ = problem
    nothing = Plan(frozenset())
    first = room(trace, sizes, nothing, budget)[0]
    start: list[int] = []
    for chunk in sorted(there):
        if chunk < len(sizes) and sum(sizes[c].weights for c in [*start, chunk]) <= first:
            start.append(chunk)
    run(trace, sizes, nothing, budget, start=start)


@settings(deadline=None, max_examples=80)
@given(problems())
def test_one_byte_less_than_the_smallest_budget_does_not_work(problem):
    trace, sizes, _, _ = problem
    least, nothing = smallest_budget(trace, sizes), Plan(frozenset())
    assert fits(trace, sizes, nothing, least)
    assert not fits(trace, sizes, nothing, least - 1)


def test_with_room_for_k_chunks_a_palindrome_brings_each_once_and_the_rest_again():
    """Belady on there and back: what is brought last stays for the way back, so n + (n - k) are brought."""
    trace, sizes = palindrome(10), [Sizes(10, 0, 0)] * 10
    for k in range(1, 11):
        brought = run(trace, sizes, Plan(frozenset()), 10 * k)
        ahead = 1 if k > 1 else 0  # one place is for what comes next while the last is in use
        assert len(brought) in (20 - k, 20 - k + ahead), (k, brought)


def test_what_is_needed_next_comes_ahead_of_its_use():
    trace, sizes, nothing = palindrome(4), [Sizes(10, 0, 0)] * 4, Plan(frozenset())
    assert decide(trace, 0, (), sizes, nothing, room(trace, sizes, nothing, 20)).bring == (0, 1)
    assert decide(trace, 0, (), sizes, nothing, room(trace, sizes, nothing, 10)).bring == (0,)
    narrow = replace(trace, other_bytes=(0, 15, 0, 0, 0, 0, 0, 0))
    assert decide(narrow, 0, (), sizes, nothing, room(narrow, sizes, nothing, 25)).bring == (0,)


def test_the_furthest_goes_first():
    trace, sizes, nothing = palindrome(4), [Sizes(10, 0, 0)] * 4, Plan(frozenset())
    moves = decide(trace, 2, {0, 1}, sizes, nothing, room(trace, sizes, nothing, 20))
    assert moves.free == (0, 1) and moves.bring == (2, 3)  # 0 is used last of all


def test_sums_of_gradients_take_more_than_one():
    """They stay, wider, while the next backward's come; without them, one on its way is all that is always there."""
    plan, trace = Plan(frozenset({0}), on_device({0})), palindrome(2)
    once, summed = [Sizes(2, 2, 12)] * 2, [Sizes(2, 2, 12, 4)] * 2
    assert (plan.resident(once), plan.resident(summed)) == (2 + 12 + 2, 2 + 12 + 4 + 2 + 2)
    assert plan.gradients(trace, summed) == [0, 0, 0, 0]


def test_gradients_that_stay_take_memory_from_their_backward_on():
    sizes, trace = [Sizes(0, 10 + c, 5) for c in range(3)], palindrome(3)
    plan = Plan(frozenset({0, 2}), on_device({0, 2}))
    assert plan.gradients(trace, sizes) == [0, 0, 0, 12, 12, 22]
    resident = 5 + 5 + 11  # state, and the other's gradient on its way
    assert room(trace, sizes, plan, 100) == [100 - resident - g for g in (0, 0, 0, 12, 12, 22)]
    peaked = replace(
        trace, other_bytes=(0, 0, 70, 0, 0, 0)
    )  # activations are most before any gradient is there
    assert fits(peaked, sizes, plan, resident + 70) and not fits(peaked, sizes, plan, resident + 69)


def test_plans_keep_state_only_with_weights():
    with pytest.raises(PlanError, match="without its weights"):
        Plan(frozenset({1}), on_device({0, 1}))


def test_fractions_take_the_first_used():
    trace, sizes = palindrome(4), [Sizes(10, 10, 60)] * 4
    plan = fractions(trace, sizes, 0.75, 0.5)
    assert plan.weights == {0, 1, 2} and plan.state == {0, 1}


# -- time ----------------------------------------------------------------------------------------------------------


def test_a_step_is_never_shorter_than_its_floor():
    trace, sizes, step = palindrome(8, seconds=2.0), [Sizes(20, 20, 120)] * 8, Step([10] * 8)
    for state in range(9):
        plan = Plan(frozenset(range(8)), on_device(range(state)))
        seconds, lanes = simulate(trace, sizes, plan, 10**6, RATES, step)
        assert seconds >= floor(trace, sizes, plan, RATES, step) * (1 - 1e-9)
        assert all(begin <= end for lane in vars(lanes).values() for begin, end, _ in lane)
        for lane in vars(lanes).values():
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(lane)), (
                "a lane does two things at once"
            )


def test_the_search_uses_the_memory_there_is():
    trace, sizes, step = palindrome(8, seconds=0.1), [Sizes(20, 20, 120)] * 8, Step([10] * 8)
    times = []
    for budget in (120, 300, 600, 2000):
        plan = best_plan(trace, sizes, budget, RATES, step)
        times.append(simulate(trace, sizes, plan, budget, RATES, step)[0])
    assert plan.state == set(range(8))
    assert times == sorted(times, reverse=True) and times[-1] < times[0] / 2


def test_more_passes_a_step_share_the_optimizer():
    trace, sizes = palindrome(4), [Sizes(20, 20, 120)] * 4
    plan = Plan(frozenset(range(4)))
    one, _ = simulate(trace, sizes, plan, 10**6, RATES, Step([1000] * 4, 1))
    four, _ = simulate(trace, sizes, plan, 10**6, RATES, Step([1000] * 4, 4))
    assert one < four < 4 * one


# -- states --------------------------------------------------------------------------------------------------------


def test_no_way_leads_to_a_use_without_arriving():
    assert not any(event is Event.USE and state in (State.FREE, State.COMING) for state, event in TABLE)
    assert all(before is State.COMING for (before, event) in TABLE if event is Event.ARRIVED)
    reached, ahead = {State.FREE}, [State.FREE]
    while ahead:
        state = ahead.pop()
        for (before, _), after in TABLE.items():
            if before is state and after not in reached:
                reached.add(after)
                ahead.append(after)
    assert reached == set(State)


def test_what_the_table_lacks_is_refused():
    assert follow(State.FREE, Event.BRING, "w") is State.COMING
    with pytest.raises(PlanError, match=r"chunk 'w' cannot do this now(.|\n)*use in state free"):
        follow(State.FREE, Event.USE, "w")


def test_the_ledger_holds_its_limit():
    ledger = Ledger(limit=10)
    ledger.change("weights", 6)
    with pytest.raises(PlanError, match="budget would be exceeded"):
        ledger.change("gradients", 5)
    assert ledger.total == 6
    ledger.change("weights", -4)
    assert ledger.since() == 6 and ledger.since() == 2 and ledger.peak == 6
