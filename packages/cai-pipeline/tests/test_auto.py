"""`schedule = "auto"`: what a step took becomes costs, and the costs a schedule that all ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pipeline_families import build, config_of, token_ids
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from cai_mesh.errors import PlanError
from cai_mesh.testing import run_ranks
from cai_pipeline import Observers, PipelineRunner, begin_with, place, simulate, split
from cai_pipeline.plans.actions import Action, Kind
from cai_pipeline.plans.scheduler import Costs, Found, Policy, most_bytes, search
from cai_pipeline.plans.simulation import Timeline
from cai_pipeline.run import auto
from cai_pipeline.run.auto import WORTH, _cheapest
from cai_pipeline.run.recorder import Recorded, costs_of

GIB = 2.0**30
HELD = place(2, 2, "v")
COSTS = Costs(
    (3.0, 2.5, 2.5, 5.0),
    (4.0, 4.0, 3.5, 3.0),
    (2.0, 2.0, 2.5, 1.5),
    (4 * GIB, 5 * GIB, 4 * GIB, 3 * GIB),
    (2 * GIB, 3 * GIB, 2 * GIB, 1 * GIB),
    0.25,
)


def test_costs_are_those_of_the_step() -> None:
    begun = begin_with("auto", HELD, 6)
    recorded: list[list[Recorded]] = [[], []]
    for span in simulate(begun, COSTS.duration, transfer=COSTS.transfer).spans:
        recorded[span.rank].append(
            Recorded(span.action, span.start, span.end, int(COSTS.gained(span.action)))
        )
    found = costs_of(recorded, HELD)
    for name in ("forward", "backward_input", "backward_weight", "kept", "stashed", "transfer"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name)), name


def test_every_backward_of_the_measured_step_is_split() -> None:
    for held in (place(4), place(2, 3), place(4, 2, "v")):
        kinds = [action.kind for actions in begin_with("auto", held, 8) for action in actions]
        assert kinds.count(Kind.FORWARD) == kinds.count(Kind.BACKWARD_INPUT) == 8 * len(held)
        assert kinds.count(Kind.BACKWARD_WEIGHT) == 8 * len(held)
    with pytest.raises(PlanError, match="no schedule takes this placement"):
        begin_with("auto", (0, 1, 1, 0, 0, 1), 8)


def test_memory_is_taken_only_for_time() -> None:
    used = most_bytes(begin_with("auto", HELD, 8), COSTS)
    times = {}
    for room in (0.0, 4 * GIB, 64 * GIB):
        found = _cheapest(HELD, 8, COSTS, used, [room, room + 2 * GIB])
        assert found.bytes[0] <= used[0] + room and found.bytes[1] <= used[1] + room + 2 * GIB
        times[room] = found.time
    assert times[64 * GIB] <= WORTH * times[4 * GIB] <= WORTH**2 * times[0.0]


def test_large_programs_are_searched_with_fewer_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def counted(*arguments: Any, policies: Sequence[Policy]) -> Found:
        tried.append(len(policies))
        return search(*arguments, policies=policies[:1])

    monkeypatch.setattr(auto, "search", counted)
    for p, m, most in ((2, 4, 16), (16, 256, 4)):
        tried.clear()
        held = place(p)
        costs = Costs(*((1.0,) * p for _ in range(5)))
        auto._cheapest(held, m, costs, [float(p)] * p, [4.0] * p)
        assert tried and max(tried) <= most
        assert sum(tried) * 3 * m * p <= 1.5 * auto.SEARCHED


Agreed = tuple[str, list[list[Action]], list[float], list[Timeline]]


def agreed(chunks: int) -> Agreed:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))
    model = split(build(config_of("llama", 4)), mesh, chunks=chunks, placement="v" if chunks == 2 else "loop")
    told: list[str] = []
    shown: list[Timeline] = []
    runner = PipelineRunner(
        model,
        mesh,
        schedule="auto",
        microbatches=4,
        loss_fn=lambda output, target: cross_entropy(output.logits.flatten(0, 1), target.flatten()),
        observers=Observers(
            on_choice=lambda choice: told.append(str(choice)),
            on_recorded=lambda *timelines: shown.extend(timelines),
        ),
    )
    ids = [token_ids(m, length=8) for m in range(4)]
    losses = [float(runner.step([{"input_ids": each} for each in ids], ids)) for _ in range(4)]
    assert len(told) == 1
    return told[0], runner.compute, losses, shown


@pytest.mark.parametrize("chunks", [1, 2])
def test_all_ranks_choose_the_same(chunks: int) -> None:
    ranks = run_ranks(4, agreed, chunks)
    told, compute, losses, (ran, simulated) = ranks[0]
    assert all(other[0] == told and other[1] == compute for other in ranks)
    for each in (ran, simulated):
        performed = [[span.action for span in each.spans if span.rank == rank] for rank in range(2)]
        assert performed == compute
        assert 0 < each.makespan < 60
    assert "ms a step predicted" in told
    torch.testing.assert_close(torch.tensor(losses), torch.full((4,), losses[0]))
