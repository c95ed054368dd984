"""What a recorded step says, and that recording it changes nothing."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from offloaded import SLOW_HOST, Net, build, moved, train

from cai_gemini import Tiers, Timeline
from cai_gemini.engine.clock import Clock
from cai_gemini.memory.ledger import Ledger
from cai_gemini.memory.timeline import Recorder
from cai_gemini.planning.policy import Plan, Sizes, StepPlace
from cai_gemini.planning.simulation import Step, simulate
from cai_gemini.planning.trace import Trace, Use
from cai_mesh.errors import PlanError

BUDGET = 80_000


@pytest.mark.parametrize("residency", ["host", Tiers(0.5, 0.3)], ids=str)
def test_a_recorded_step(residency, tmp_path):
    model, optimizer = moved(*build(), residency, BUDGET)
    train(model, optimizer, steps=3)
    optimizer.record_timeline()
    optimizer._engine.worker.submit(lambda: time.sleep(0.5))  # the host is late
    train(model, optimizer, steps=1, micro=1)
    timeline = optimizer.timeline()
    chunks = optimizer._engine.chunks
    assert timeline.budget == BUDGET and timeline.times == sorted(timeline.times)
    assert {kind: values[-1] for kind, values in timeline.memory.items()} == dict(
        optimizer._engine.ledger.nbytes
    )
    assert all(len(values) == len(timeline.times) for values in timeline.memory.values())
    assert len(set(timeline.memory["weights"])) > 1
    for lane, spans in timeline.lanes.items():
        assert all(0 <= begin <= end for begin, end, _ in spans), lane
        if lane != "to_device":  # which two threads copy to, where there are no streams
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), lane
    moving = {h.name for h in chunks if h.place is not StepPlace.DEVICE and h.step is not None}
    assert {name for *_, name in timeline.lanes["host"]} == moving
    assert {name for *_, name in timeline.lanes["to_host"]} == moving
    assert {name for *_, name in timeline.lanes["compute"]} == {h.name for h in chunks}
    came = {name for *_, name in timeline.lanes["to_device"]}
    assert moving <= came <= moving | {h.name for h in chunks if not h.stays}
    timeline.save(tmp_path / "step.json")
    assert Timeline.load(tmp_path / "step.json") == timeline


def test_recording_changes_nothing_and_ends():
    expected = train(*moved(*build(), "host", BUDGET))
    model, optimizer = moved(*build(), "host", BUDGET)
    optimizer.record_timeline()
    assert train(model, optimizer) == expected
    assert len(optimizer.timeline().lanes["compute"]) > 0
    assert optimizer._engine.copies.recorder is None and optimizer._engine.ledger.changed is None
    with pytest.raises(PlanError, match="no timeline was recorded"):
        optimizer.timeline()


def test_a_simulated_step_is_one_too():
    trace = Trace((Use(0, False), Use(1, False), Use(1, True), Use(0, True)), (0,) * 4, (1.0,) * 4)
    sizes = [Sizes(10, 10, 30), Sizes(20, 20, 60)]
    _, lanes = simulate(trace, sizes, Plan(frozenset()), 200, SLOW_HOST, Step([10, 20]))
    timeline = Timeline.simulated(lanes, ["first", "second"])
    assert [name for *_, name in timeline.lanes["compute"]] == ["first", "second", "second", "first"]
    assert timeline.end == pytest.approx(lanes.end) and timeline.memory == {}


def test_nothing_is_recorded_unless_asked():
    model, optimizer = moved(*build(), "host", BUDGET)
    assert isinstance(model, Net) and optimizer._engine.copies.recorder is None
    train(model, optimizer, steps=1)
    assert torch.is_tensor(next(model.parameters()))


def test_a_clock_does_not_count_what_the_host_waits(monkeypatch):
    clock, now = Clock(torch.device("cpu"), Ledger(), None), iter(range(100))
    monkeypatch.setattr(clock, "_now", lambda: float(next(now)))
    with clock.paused():  # no use yet
        pass
    clock.start()  # 0
    with clock.paused():  # 1 to 2
        pass
    with clock.paused():  # 3 to 4
        pass
    clock.stop()  # 5
    with clock.paused():
        pass
    clock.start()
    assert clock.seconds() == [3.0, 0.0] and clock.seconds() == []


def test_of_two_passes_the_quicker_use_counts():
    """Where the passes are the same; bytes are those of the last."""
    uses = (Use(0, False), Use(0, True))
    first, then = Trace(uses, (5, 9), (3.0, 1.0)), Trace(uses, (6, 7), (1.0, 2.0))
    assert then.quickest(first) == Trace(uses, (6, 7), (1.0, 1.0))
    assert then.quickest(None) is then and then.quickest(Trace(uses[:1], (5,), (0.5,))) is then


def test_what_was_under_way_begins_with_the_record():
    before = time.perf_counter()
    recorder = Recorder(torch.device("cpu"), Ledger())
    recorder.span("disk", before, time.perf_counter(), "chunk 0")
    ((begin, end, name),) = recorder.timeline(None).lanes["disk"]
    assert (begin, name) == (0, "chunk 0")
    assert end > 0
