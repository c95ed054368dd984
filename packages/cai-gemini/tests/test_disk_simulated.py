"""The disk as a lane: what a simulated step makes of it, how its rates are measured, and what a timeline shows."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import torch
from offloaded import build, train
from offloaded_to_disk import MIXES, moved, on_disk
from traces import RATES, palindrome

from cai_gemini import Tiers, offload
from cai_gemini.engine import planner
from cai_gemini.engine.disk_use import disk_traffic
from cai_gemini.planning.policy import Plan, Sizes, on_device
from cai_gemini.planning.simulation import DiskBytes, Step, best_plan, floor, simulate
from cai_gemini.rates import disk as rates
from cai_gemini.rates import link

pytestmark = pytest.mark.filterwarnings("ignore:.*is no disk but memory")

BLOCKS, BUDGET = 4, 100
SIZES = [Sizes(10, 10, 60)] * BLOCKS
NOTHING = Plan(frozenset())
SLOW = replace(RATES, disk_read=4.0, disk_write=2.0)


def run(plan=NOTHING, known=SLOW, disk=None, seconds=1.0):
    step = Step([1] * BLOCKS, 1, disk or {})
    trace = palindrome(BLOCKS, seconds=seconds)
    return simulate(trace, SIZES, plan, BUDGET, known, step), floor(trace, SIZES, plan, known, step)


def test_without_a_disk_its_rates_mean_nothing():
    assert run() == run(known=RATES)
    everything = {c: DiskBytes(60, 70, 10) for c in range(BLOCKS)}
    assert run(known=RATES, disk=everything)[0][0] == pytest.approx(run()[0][0])


@pytest.mark.parametrize("weights", [0, 10])
def test_a_slow_disk_is_the_floor_and_a_step_is_near_it(weights):
    disk = {c: DiskBytes(60, 60 + weights, weights) for c in range(BLOCKS)}
    (seconds, lanes), least = run(disk=disk)
    reads = sum(d.read + d.weights for d in disk.values())
    assert least == pytest.approx(reads / 4.0 + sum(d.written for d in disk.values()) / 2.0)
    assert 0.999 * least <= seconds <= 1.2 * least
    for (_, end, _), (begin, _, _) in itertools.pairwise(lanes.disk):
        assert begin >= end - 1e-9, "one disk does one thing at a time"


def test_reads_run_ahead_of_host_steps():
    """A chunk is read while the one before it is stepped; without that, steps and reads would add up."""
    known = replace(RATES, host_step=2.8, disk_read=6.0, disk_write=1e9)  # 10 seconds each
    disk = {c: DiskBytes(60, 60) for c in range(BLOCKS)}
    (_, lanes), _ = run(known=known, disk=disk, seconds=0.0)
    span = max(end for _, end, _ in lanes.host) - min(begin for begin, _, _ in lanes.disk)
    assert span == pytest.approx(10.0 * (BLOCKS + 1))


def test_state_on_the_device_leaves_the_disk():
    disk = {c: DiskBytes(60, 60) for c in range(BLOCKS)}
    stays = Plan(frozenset({0}), on_device({0}))
    assert run(stays, disk=disk)[1] == pytest.approx(3 * (60 / 4 + 60 / 2))
    assert {chunk for _, _, chunk in run(stays, disk=disk)[0][1].disk} == {1, 2, 3}
    found = best_plan(palindrome(BLOCKS), SIZES, 300, SLOW, Step([1] * BLOCKS, 1, disk))
    assert len(found.state) == 3, "memory that is there spares the disk"


def test_rates_of_a_disk_are_measured_within_bounds(tmp_path, monkeypatch):
    read, written = rates.measure_disk(tmp_path)
    assert read > 0 < written
    assert not os.listdir(tmp_path)
    moved_bytes = []
    monkeypatch.setattr(rates, "DISK_SECONDS", 0.0)
    reserve = rates.NvmeStore.reserve

    def watched(store, name, numel, dtype, **options):
        moved_bytes.append(store)
        return reserve(store, name, numel, dtype, **options)

    monkeypatch.setattr(rates.NvmeStore, "reserve", watched)
    monkeypatch.setattr(rates.NvmeStore, "close", lambda store: None)
    rates.measure_disk(tmp_path)
    store = moved_bytes[0]
    assert store.traffic.written_bytes == store.traffic.read_bytes == rates.DISK_PIECE
    assert store.reserved_bytes <= rates.DISK_BYTES


def test_auto_plans_with_the_disk(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(link, "_step_rate", lambda device, numel: 1e9)
    monkeypatch.setattr(
        "cai_gemini.engine.disk_use.measure_disk", lambda place: asked.append(place) or (1e3, 2e3)
    )
    seen = []
    monkeypatch.setattr(planner, "best_plan", lambda *a: seen.append(a) or best_plan(*a))
    model, ours = offload(*build(), device_memory="80KB", host_memory="70KB", nvme=tmp_path)
    assert on_disk(ours)
    train(model, ours, steps=3)
    assert asked == [str(tmp_path)]
    *_, known, step = seen[0]
    assert (known.disk_read, known.disk_write) == (1e3, 2e3)
    assert set(step.disk) >= {i for i, h in enumerate(ours._engine.chunks) if h.disk is not None}


@pytest.mark.parametrize("residency", MIXES, ids=str)
def test_what_is_said_of_the_disk_is_what_it_moves(tmp_path, residency):
    model, ours = moved(*build(), tmp_path, residency, compute=torch.bfloat16)
    train(model, ours, steps=3)
    ours.wait()
    store, chunks = ours._engine.store, ours._engine.chunks
    traffic = disk_traffic(chunks)
    before = store.traffic
    train(model, ours, steps=1, micro=1)
    ours.wait()
    stepped = {i: d for i, d in traffic.items() if chunks[i].gradients.touched or chunks[i].step is not None}
    written = store.traffic.written_bytes - before.written_bytes
    assert written == sum(d.written for d in stepped.values())
    read = store.traffic.read_bytes - before.read_bytes - sum(d.read for d in stepped.values())
    weights = [d.weights for d in traffic.values() if d.weights]
    assert read >= 0
    assert bool(read) == bool(weights)
    said = ours.placement()
    assert said.disk_bytes == sum(r.nbytes for chunk in on_disk(ours) for r in chunk.disk_regions())


def test_a_timeline_shows_the_disk(tmp_path):
    model, ours = moved(*build(), tmp_path, Tiers(disk=1.0, disk_weights=1.0))
    train(model, ours, steps=3)
    ours.wait()
    ours.record_timeline()
    train(model, ours, steps=1)
    found = ours.timeline()
    named = {name for _, _, name in found.lanes["disk"]}
    trained = {chunk.name for chunk in on_disk(ours) if chunk.step is not None}
    assert named >= trained
    assert len(found.lanes["disk"]) > len(trained), "steps, and weights that were brought"
    assert all(0 <= begin <= end <= found.end for begin, end, _ in found.lanes["disk"])
