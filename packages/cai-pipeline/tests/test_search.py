from __future__ import annotations

import random

import pytest

from cai_mesh.errors import PlanError
from cai_pipeline.plans.checker import check
from cai_pipeline.plans.lowering import lower
from cai_pipeline.plans.placement import Held, place
from cai_pipeline.plans.scheduler import Costs, most_bytes, search
from cai_pipeline.plans.schedules import SCHEDULES, program
from cai_pipeline.plans.simulation import simulate

TABLES = 200


def even(stages: int, chunks: int = 1) -> Costs:
    """Every action of a stage takes as long, and a rank's stages together keep 1 byte."""
    one = (1.0 / chunks,) * stages
    return Costs(one, one, one, kept=one, stashed=one)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_it_finds_a_step_without_bubbles(p: int) -> None:
    """In a V, in the memory of 1F1B: (p - 1) / 2 of a rank's forward at the start, as ZB-V has it."""
    m = 4 * p
    found = search(place(p, 2, "v"), m, even(2 * p, 2), [p] * p)
    assert found.time == pytest.approx(3 * m + (p - 1) / 2)
    assert max(found.bytes) <= p


def test_more_memory_is_never_slower_and_less_is_said() -> None:
    held, costs = place(4), even(4)
    times = [search(held, 12, costs, [limit] * 4).time for limit in (4, 5, 6, 8)]
    assert times == sorted(times, reverse=True)
    assert times[1] == 3 * 12 + 3, "ZB-H1"
    with pytest.raises(PlanError, match="no schedule fits"):
        search(held, 12, costs, [0.5] * 4)


def drawn(seed: int) -> tuple[Held, int, Costs, list[float], dict[str, float]]:
    """Random costs, a limit that 1F1B or a bit more takes, and the times of the named schedules that fit it."""
    draw = random.Random(seed)
    p = draw.choice((2, 3, 4, 6))
    chunks, placement = draw.choice(((1, "loop"), (2, "v"), (2, "loop")))
    held, m = place(p, chunks, placement), draw.choice((p, 2 * p, 3 * p + 1, 5))  # type: ignore[arg-type]

    def each(least: float, most: float) -> tuple[float, ...]:
        return tuple(draw.uniform(least, most) for _ in held)

    kept = each(0.8, 1.2)
    stashed = tuple(draw.uniform(0.3, 0.9) * bytes_ for bytes_ in kept)
    costs = Costs(
        each(0.7, 1.3), each(0.7, 1.5), each(0.5, 1.2), kept, stashed, draw.choice((0.0, 0.05, 0.2))
    )
    limits = [chunks * p * draw.choice((1.2, 1.5, 2.0))] * p
    times = {}
    for name in SCHEDULES:
        try:
            named = program(name, held, m)
        except PlanError:
            continue
        if all(got <= most for got, most in zip(most_bytes(named, costs), limits, strict=True)):
            times[name] = simulate(named, costs.duration, transfer=costs.transfer).makespan
    return held, m, costs, limits, times


def test_it_never_loses_to_a_named_schedule_and_often_wins() -> None:
    wins = 0
    for seed in range(TABLES):
        held, m, costs, limits, named = drawn(seed)
        found = search(held, m, costs, limits)
        check(lower(found.program), m)
        assert all(got <= most + 1e-6 for got, most in zip(found.bytes, limits, strict=True))
        assert found.time <= min(named.values(), default=float("inf"))
        wins += found.name == "searched" and found.time < 0.999 * min(named.values(), default=float("inf"))
    assert wins >= 0.3 * TABLES, wins
