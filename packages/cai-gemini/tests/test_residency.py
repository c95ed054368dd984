"""`ChunkResidency` driven by hand, by fetches, gradients and steps, as whoever shards would; and its pure parts."""

from __future__ import annotations

import errno
import re
import threading
from dataclasses import replace

import pytest
import torch
from disks import Disk, fails, within
from offloaded import SLOW_HOST
from stored_shards import BLOCKS, CPU, shards_of, trained
from torch import nn

from cai_gemini import ChunkResidency, Tiers, Tuning
from cai_gemini.chunk.gradient import counted, sums_of_squares
from cai_gemini.chunk.states import State
from cai_gemini.nvme import NvmeError
from cai_gemini.planning.policy import Plan, Sizes, decide, fits, room, smallest_budget
from cai_gemini.planning.trace import Trace, Use
from cai_mesh.errors import PlanError
from cai_mesh.gradients import flat_of, plain
from cai_mesh.layout import attach, record_of
from cai_mesh.protocols import Residency
from cai_mesh.storage import FlatUnit, StoredShard


def use(residency: Residency, shard: StoredShard) -> torch.Tensor:
    residency.fetch(shard).wait()
    assert shard.on_device is not None
    found = shard.on_device.clone()
    residency.release(shard)
    return found


def step(residency: ChunkResidency, stored: list[StoredShard], optimizer, number: int) -> list[torch.Tensor]:
    """Two forwards and backwards and a step; returns what was fetched."""
    seen = []
    for part in range(2):
        seen += [use(residency, shard) for shard in stored]
        for i, shard in reversed(list(enumerate(stored))):
            seen.append(use(residency, shard))
            if shard.gradients is not None:
                residency.keep_gradient(shard, gradient(shard, number, part, i))
    optimizer.step()
    optimizer.zero_grad()
    return seen


def planned(residency="auto", memory=10**6, nvme=None, **options) -> ChunkResidency:
    tuning = Tuning(rates=SLOW_HOST, **options)
    return ChunkResidency(residency, device_memory=memory, nvme=nvme, tuning=tuning)


def gradient(shard: StoredShard, number: int, part: int, index: int) -> torch.Tensor:
    """Of a backward; padding is zero."""
    generator = torch.Generator().manual_seed(100 * number + 10 * part + index)
    grad = torch.zeros(shard.unit.shard.numel())
    for low, high in shard.unit.ranges:
        grad[low:high] = torch.randn(high - low, generator=generator)
    return grad


STREAMED = Tiers(0.5, 0.2, streamed=0.6)
DISKS = ["nvme", Tiers(0.4, 0.3, disk=0.7), Tiers(0.6, 0.3, disk=0.4, disk_weights=0.5)]


@pytest.mark.parametrize("tiers", ["auto", "host", "device", Tiers(0.6, 0.4), STREAMED, *DISKS], ids=str)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_fetched_is_what_a_plain_optimizer_makes(tiers, compute, tmp_path):
    """The twin steps copies of the parameters, with gradients added in the order in which they came: bit for bit."""
    residency = planned(tiers, nvme=tmp_path)
    stored = shards_of(residency, compute)
    twins = [[flat_of(p).clone() for p in one.unit.kept] for one in stored]
    theirs = torch.optim.AdamW([t for i, ts in enumerate(twins) if i != 1 for t in ts], lr=1e-2, fused=True)
    ours = residency.optimizer(torch.optim.AdamW(trained(stored), lr=1e-2, fused=True))
    for number in range(5):
        expected = [[t.to(compute) for t in ts] for ts in twins]
        seen = step(residency, stored, ours, number)
        for got, index in zip(seen, 2 * [*range(BLOCKS), *reversed(range(BLOCKS))], strict=True):
            for (low, high), wanted in zip(stored[index].unit.ranges, expected[index], strict=True):
                assert got.dtype == compute and torch.equal(got[low:high], wanted)
        for i, (one, ts) in enumerate(zip(stored, twins, strict=True)):
            total = gradient(one, number, 0, i) + gradient(one, number, 1, i)
            for (low, high), twin in zip(one.unit.ranges, ts, strict=True):
                twin.grad = total[low:high]
        theirs.step()
    assert residency._engine.planned
    for one, ts in zip(stored, twins, strict=True):
        assert all(torch.equal(flat_of(p), twin) for p, twin in zip(one.unit.kept, ts, strict=True))


@pytest.mark.parametrize("part", ["weights", "master weights", "exp_avg"])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failing_disk_is_an_error_that_names_path_and_parameter(tmp_path, part, call):
    residency = planned("nvme", nvme=tmp_path)
    stored = shards_of(residency, torch.bfloat16)
    optimizer = residency.optimizer(torch.optim.AdamW(trained(stored), lr=1e-2))
    for number in range(2):
        step(residency, stored, optimizer, number)
    optimizer.wait()
    chunk = residency._engine.chunks[2]
    region = {r.name: r for r in chunk.disk_regions()}[f"{chunk.name} ({part})"]
    residency._engine.store._file._sys = Disk(**{call: within(region, fails(errno.EIO))})

    def go_on():
        for number in range(2, 5):
            step(residency, stored, optimizer, number)

    with pytest.raises(NvmeError) as caught:
        go_on()
    assert region.name in str(caught.value) and str(tmp_path) in str(caught.value)


def test_host_memory_that_is_short_spills_to_the_disk(tmp_path):
    """To the byte that the error asks for."""

    def of(host_memory, nvme=None):
        residency = ChunkResidency("host", host_memory=host_memory, nvme=nvme)
        return residency.optimizer(torch.optim.AdamW(trained(shards_of(residency, width=4000)), lr=1e-2))

    with pytest.raises(PlanError, match=r"host memory is too small(.|\n)*or pass nvme") as caught:
        of(10_000)
    enough = int(re.search(r"expected: ([\d,]+) bytes", str(caught.value))[1].replace(",", ""))
    assert of(enough).placement().state_on_disk == 0
    assert of(enough - 1, tmp_path).placement().state_on_disk > 0


def test_a_traced_step_is_complete():
    """All micro-batches, with those uses as backwards that gradients followed, and nothing of the step before."""
    residency = planned("host")
    stored = shards_of(residency)
    optimizer = residency.optimizer(torch.optim.AdamW(trained(stored), lr=1e-2))
    for number in range(2):
        step(residency, stored, optimizer, number)
    forward = [Use(i, False) for i in range(BLOCKS)]
    backward = [Use(i, i != 1) for i in reversed(range(BLOCKS))]
    assert residency._engine.trace.uses == tuple(2 * (forward + backward))


def test_a_step_that_is_left_out_is_not_traced():
    """As a loss scale does: gradients are dropped, and the next backward belongs to another step."""
    residency = planned("host")
    stored = shards_of(residency)
    optimizer = residency.optimizer(torch.optim.AdamW(trained(stored), lr=1e-2))
    expected = None
    for number, skipped in enumerate([False, True, False]):
        if skipped:
            use(residency, stored[2])
            residency.keep_gradient(stored[2], gradient(stored[2], number, 0, 2))
            optimizer.zero_grad()
        else:
            step(residency, stored, optimizer, number)
            expected = expected or residency._engine.trace.uses
    assert residency._engine.trace.uses == expected


def test_nothing_is_traced_without_an_optimizer():
    residency = planned("host")
    stored = shards_of(residency)
    for _ in range(3):
        for one in stored:
            use(residency, one)
    assert not residency._engine._seen


def test_versions_tell_of_steps_and_writes():
    residency = planned("host")
    stored = shards_of(residency)
    optimizer = residency.optimizer(torch.optim.AdamW(trained(stored), lr=1e-2))
    for number in range(3):
        before = [residency.version(one) for one in stored]
        step(residency, stored, optimizer, number)
        after = [residency.version(one) for one in stored]
        assert [a != b for a, b in zip(before, after, strict=True)] == [True, False, True, True]
        optimizer.wait()
        assert [residency.version(one) for one in stored] == after, "a step that ends is not another change"
    with torch.no_grad():
        stored[1].unit.kept[0].mul_(2)
    written = residency.version(stored[1])
    assert written != after[1]
    assert torch.equal(use(residency, stored[1]), stored[1].unit.shard)
    assert residency.version(stored[1]) == written, "what is taken over is not another change"


def test_a_version_is_that_of_the_step_while_the_step_writes():
    residency = planned("host")
    stored = shards_of(residency)
    optimizer = residency.optimizer(torch.optim.SGD(trained(stored), lr=1e-2))  # whose writes are counted
    chunk_step, written, gate = residency._engine.chunks[0].step, threading.Event(), threading.Event()
    run = chunk_step.run
    chunk_step.run = lambda *args: (run(*args), written.set(), gate.wait())  # type: ignore[method-assign]
    step(residency, stored, optimizer, 0)
    written.wait()
    during = residency.version(stored[0])
    gate.set()
    optimizer.wait()
    assert residency.version(stored[0]) == during


def test_a_plain_optimizers_steps_are_seen():
    """Torch's fused steps write without counting a version."""
    residency = ChunkResidency("host")
    stored = shards_of(residency)
    optimizer = torch.optim.AdamW(trained(stored), lr=1e-2, fused=True)
    first = [use(residency, one) for one in stored]
    with plain(trained(stored)):  # as the hooks of `shard_module` have it
        step(residency, stored, optimizer, 0)
    assert not any(
        torch.equal(use(residency, one), a) for one, a in zip(stored, first, strict=True) if one.gradients
    )
    assert all(torch.equal(use(residency, one), one.unit.shard) for one in stored)


def test_shards_in_use_are_not_freed():
    residency = planned("host", memory=10**5)
    stored = shards_of(residency)
    optimizer = residency.optimizer(torch.optim.AdamW(trained(stored), lr=1e-2))
    coming = [residency.fetch(one) for one in stored]
    for handle in coming:
        handle.wait()
    assert all(one.on_device is not None for one in stored)
    chunks = residency._engine.chunks
    assert all(chunk.in_use for chunk in chunks)
    for one in stored:
        residency.release(one)
    step(residency, stored, optimizer, 0)
    assert all(chunk.state is State.FREE for chunk in chunks if chunk.trains)


# -- the pure parts ------------------------------------------------------------------------------------------------


def test_chunks_in_use_beside_the_current_one_count():
    sizes = [Sizes(5, 0, 0), Sizes(3, 0, 0), Sizes(2, 0, 0)]
    uses = (Use(0, False), Use(1, False), Use(2, False))
    trace = Trace(uses, (0, 0, 0), (1.0,) * 3, (frozenset(), frozenset({0}), frozenset({0, 1})))
    nothing = Plan(frozenset())
    assert smallest_budget(trace, sizes) == 10
    assert fits(trace, sizes, nothing, 10) and not fits(trace, sizes, nothing, 9)
    kept = Plan(frozenset({0}))
    assert fits(trace, sizes, kept, 10) and not fits(trace, sizes, kept, 9), "what stays is not counted twice"
    moves = decide(trace, 2, {0, 1}, sizes, nothing, room(trace, sizes, nothing, 10))
    assert (moves.free, moves.bring) == ((), (2,))
    assert decide(trace, 1, {0}, sizes, nothing, [10] * 3).bring == (1, 2)
    assert decide(trace, 1, {0}, sizes, nothing, [10, 10, 9]).bring == (1,), "0 and 1 are in use when 2 comes"
    assert decide(trace, 1, {0, 2}, sizes, nothing, [9] * 3).free == (2,)


def test_a_use_is_found_again_after_a_detour():
    order = [0, 1, 2, 3, 3, 2, 1, 0]
    trace = Trace(tuple(Use(c, False) for c in order), (0,) * 8, (1.0,) * 8)
    at, found = -1, []
    for chunk in [0, 1, 2, 3, 3, 2, 1, 0]:
        at = trace.follow(chunk, at)
        found.append(at)
    assert found == list(range(8))
    at = 3  # a forward that has no backward, then a pass
    for chunk in [0, 1, 2, 3]:
        at = trace.follow(chunk, at)
    assert at == 3
    assert [trace.follow(c, at) for c in (3, 2)] == [4, 5]
    again = Trace(tuple(Use(c, False) for c in [0, 1, 2, 0, 2]), (0,) * 5, (1.0,) * 5)
    assert (again.follow(1, 0), again.follow(2, 0)) == (1, 4), "straight after a use of the same chunk"
    assert trace.follow(7, 2) is None
    assert trace.follow(3, -1) == 3


def test_squares_are_summed_by_axes_and_owner():
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    unit = FlatUnit(
        model, list(model.named_parameters()), master=torch.float32, compute=torch.float32, device=CPU
    )
    both, tp = frozenset({"dp_shard", "tp"}), frozenset({"tp"})
    for i, param in enumerate(unit.kept):
        (part,) = record_of(param).slices
        attach(param, slices=(replace(part, axes=both if i < 3 else tp, owner=i != 5),))
    gradient = torch.randn(unit.shard.numel())
    unit.chunk.clear_padding(gradient)
    parts = counted(unit, range(6))
    assert {axes: len(ranges) for axes, ranges in parts.items()} == {both: 1, tp: 1}
    sums = sums_of_squares(gradient, parts)
    pieces = [gradient[low:high].double().square().sum() for low, high in unit.ranges]
    assert float(sums[both]) == pytest.approx(float(sum(pieces[:3])), rel=1e-5)
    assert float(sums[tp]) == pytest.approx(float(sum(pieces[3:5])), rel=1e-5)
    some = sums_of_squares(gradient, counted(unit, [0, 2, 4]))
    assert float(some[both]) == pytest.approx(float(pieces[0] + pieces[2]), rel=1e-5)
