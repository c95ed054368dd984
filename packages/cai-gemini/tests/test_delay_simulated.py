"""Steps whose host part is delayed, as they are simulated: as long as the busiest of compute, link and host."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policy import RATES, palindrome, problems

from cai_gemini.policy import Plan, Sizes, fits, room
from cai_gemini.simulate import Rates, Step, _Run, best_plan, floor, simulate
from cai_gemini.trace import Trace, Use


def test_a_step_that_waits_for_the_host_gets_shorter():
    """Eight chunks of a second of compute a use, 16 seconds; weights stay. The host takes 0.5 to 3 a chunk."""
    trace, sizes = palindrome(8), [Sizes(1, 1, 6)] * 8
    plan = Plan(frozenset(range(8)), frozenset())
    for each in (0.5, 1.5, 2.0, 2.05, 2.2, 3.0):
        parameters = [each * 100 / 28] * 8
        now, late = Step(parameters), Step(parameters, delay=True)
        before, _ = simulate(trace, sizes, plan, 10**6, RATES, now)
        after, lanes = simulate(trace, sizes, plan, 10**6, RATES, late)
        first = 1 / (25.0 * 18 / 40)  # what begins with the pass
        assert after == pytest.approx(max(16.0 + first, 8 * each))
        assert after < before
        assert after >= floor(trace, sizes, plan, RATES, late) * (1 - 1e-9)
        assert [chunk for *_, chunk in lanes.host] == list(range(8))


def test_a_step_that_waits_for_the_step_before_the_last_is_simulated_over_two():
    """A chunk alone: a pass, its gradient, the host's step and the copy to the device are two steps of time."""
    uses = [Use(0, False)] * 4 + [Use(0, True)]
    trace, sizes, nothing = (
        Trace(tuple(uses), (0,) * 5, (1.0,) * 5),
        [Sizes(1, 2, 13)],
        Plan(*[frozenset()] * 2),
    )
    rates = Rates(20.0, 20.0, 40.0, 28.0, 4000.0)
    seconds, _ = simulate(trace, sizes, nothing, 3, rates, Step([5], delay=True))
    assert seconds == pytest.approx((5 + 2 / 20 + 5 + 1 / 20) / 2)


@settings(deadline=None, max_examples=80)
@given(problems(), st.floats(0.1, 100.0))
def test_simulated_seconds_are_those_of_many_steps(problem, host):
    trace, sizes, budget, plan = problem
    plan = replace(plan, streamed=frozenset())  # delayed steps are not
    if not fits(trace, sizes, plan, budget):
        return
    rates = Rates(25.0, 15.0, 18.0, host, 4000.0)
    sized = Step([s.state for s in sizes], delay=True)
    seconds, lanes = simulate(trace, sizes, plan, budget, rates, sized)
    if {use.chunk for use in trace.uses} == set(range(len(sizes))):
        assert seconds >= floor(trace, sizes, plan, rates, sized) * (1 - 1e-9)
    run, ends = _Run(trace, sizes, plan, room(trace, sizes, plan, budget), rates, sized), []
    for _ in range(200):
        ends.append(run.one())
    assert (ends[-1] - ends[99]) / 100 == pytest.approx(seconds, rel=2e-2)
    for lane in vars(lanes).values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(lane))


def test_plans_count_on_it():
    """A host that has a whole pass to step in is left more of the state."""
    trace, sizes, found = palindrome(8), [Sizes(1, 1, 6)] * 8, []
    for delay in (False, True):
        step = Step([150 / 28] * 8, delay=delay)
        plan = best_plan(trace, sizes, 40, RATES, step)
        found.append((simulate(trace, sizes, plan, 40, RATES, step)[0], len(plan.state)))
    (now, more), (late, less) = found
    assert late < now and less < more
