"""Traces of passes over chunks, and the rates and budgets that plans for them are made with."""

from __future__ import annotations

from hypothesis import strategies as st

from cai_gemini.planning.policy import Sizes, Streamable, fractions, smallest_budget
from cai_gemini.planning.simulation import Rates
from cai_gemini.planning.trace import Trace, Use

RATES = Rates(to_device=25.0, to_host=15.0, both=18.0, host_step=100.0, device_step=4000.0)


def palindrome(blocks: int, beside: int = 0, seconds: float = 1.0) -> Trace:
    """Forward over all blocks and back."""
    uses = [Use(c, False) for c in range(blocks)] + [Use(c, True) for c in reversed(range(blocks))]
    return Trace(tuple(uses), (beside,) * len(uses), (seconds,) * len(uses))


@st.composite
def problems(draw):
    """A trace, sizes, a budget that can work, and a plan that fits it."""
    chunks = draw(st.integers(1, 6))
    sizes = [
        Sizes(draw(st.integers(1, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 30)))
        for _ in range(chunks)
    ]
    uses = draw(st.lists(st.builds(Use, st.integers(0, chunks - 1), st.booleans()), min_size=1, max_size=15))
    beside = draw(st.lists(st.integers(0, 20), min_size=len(uses), max_size=len(uses)))
    trace = Trace(tuple(uses), tuple(beside), (1.0,) * len(uses))
    budget = smallest_budget(trace, sizes) + draw(st.integers(0, 60))
    streamable = Streamable(frozenset(range(chunks)), draw(st.integers(0, 20)))
    weights, state, streamed = (draw(st.floats(0, 1)) for _ in range(3))
    plan = fractions(trace, sizes, weights, state, streamed, streamable)
    return trace, sizes, budget, plan
