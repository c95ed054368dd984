"""Delayed host steps: training is a plain loop's that keeps gradients for a step, bit for bit; memory."""

from __future__ import annotations

import copy
import random
import sys
import threading
from dataclasses import replace

import pytest
import torch
from late import Late
from offloaded import SLOW_HOST, adamw, groups
from plain import assert_same, fragile, loss_of
from test_offload_loops import MEDDLING, OPTIMIZERS, backward, clip, read_state, torchs_clip

from cai_gemini import ChunkResidency, Tiers, Tuning, offload
from cai_gemini.disk_plan import OnDisk, chunk_bytes, host_bytes
from cai_gemini.simulate import best_plan
from cai_mesh.errors import PlanError
from cai_mesh.storage import units

RESIDENCIES = ["host", "device", "auto", Tiers(0.5, 0.3), Tiers(1.0, 0.0)]
DELAY = Tuning(rates=SLOW_HOST, delay=True)


def both(name="adamw", residency="host", compute=torch.float32, tuning=DELAY, **options):
    """An offloaded model, its optimizer and the plain loop beside them."""
    model = fragile()
    plain = Late(model, OPTIMIZERS[name], compute)
    model, optimizer = offload(
        model,
        OPTIMIZERS[name](groups(model)),
        residency=residency,
        device_memory="80KB",
        compute=compute,
        tuning=tuning,
        **options,
    )
    return model, optimizer, plain


def at_once(optimizer):
    """Parameters whose steps are taken on the device."""
    helds = optimizer._engine.helds
    return {name for held in helds if held.on_device for name in held.unit.chunk.names}


def step(optimizer, plain):
    optimizer.step()
    plain.step(at_once(optimizer))
    optimizer.zero_grad()


def check(model, optimizer, plain):
    """Whoever reads sees the newest, though the model does not compute with it yet."""
    plain.take()
    assert_same(model, optimizer, plain)


def trained(optimizer):
    return [h for h in optimizer._engine.helds if h.trains]


# -- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residency", RESIDENCIES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_a_loop_that_keeps_gradients_for_a_step(name, residency, compute):
    model, optimizer, plain = both(name, residency, compute)
    for at in range(7):
        for part in range(1 + (at in (3, 4))):
            backward(model, plain, 10 * at + part, skip=at % 3 == 1)  # compares losses
        if at > 2:
            clip(optimizer, plain, 0.5)
        step(optimizer, plain)
    check(model, optimizer, plain)
    assert optimizer._engine.planned
    on_device = {"host": [0], "device": [5], "auto": [1, 2, 3, 4], str(Tiers(1.0, 0.0)): [0]}
    assert len([h for h in trained(optimizer) if h.on_device]) in on_device.get(str(residency), [1, 2, 3])


def test_it_is_off_by_default():
    found = []
    for tuning in (Tuning(rates=SLOW_HOST), DELAY, replace(DELAY, overlap=False)):
        model, optimizer, _ = both(tuning=tuning)
        for at in range(3):
            loss_of(model, at, False).backward()
            optimizer.step()
        found.append(torch.cat([p.detach() for p in model.parameters()]))
    assert not torch.equal(*found[:2]) and torch.equal(*found[1:])
    assert not Tuning().delay


@pytest.mark.parametrize("delay", [False, True])
def test_auto_plans_with_it(delay, monkeypatch):
    seen = []

    def plan(*args):
        seen.append(args[-1].delay)
        return best_plan(*args)

    monkeypatch.setattr(sys.modules["cai_gemini.offload"], "best_plan", plan)
    model, optimizer, _ = both(residency="auto", tuning=Tuning(rates=SLOW_HOST, delay=delay))
    for at in range(2):
        loss_of(model, at, False).backward()
        optimizer.step()
    assert seen == [delay]


@pytest.mark.parametrize("residency", ["host", Tiers(1.0, 0.0), Tiers(0.5, 0.3)], ids=str)
def test_the_step_runs_during_all_of_the_next_forward_and_backward(residency):
    """With the host stopped, a whole pass and `step()` go through; the pass after it waits."""
    model, optimizer, plain = both(residency=residency)
    for at in range(4):
        backward(model, plain, at)
        step(optimizer, plain)
    optimizer.wait()
    gate = threading.Event()
    late = threading.Timer(30.0, gate.set)
    late.start()
    optimizer._engine.worker.submit(gate.wait)
    for at in range(4, 6):
        backward(model, plain, at)
        clip(optimizer, plain, 0.5)
        step(optimizer, plain)
    assert not gate.is_set()
    late.cancel()
    threading.Timer(0.05, gate.set).start()
    backward(model, plain, 6)
    assert gate.is_set()
    step(optimizer, plain)
    check(model, optimizer, plain)


def test_reading_waits_for_the_newest_and_publishes_nothing():
    model, optimizer, plain = both()
    for at in range(5):
        backward(model, plain, at)
        check(model, optimizer, plain)
        step(optimizer, plain)
        optimizer.wait()
        assert all(h.home._step.done() for h in trained(optimizer))
        check(model, optimizer, plain)


def test_what_somebody_writes_between_steps_is_computed_with_at_once():
    """With its chunk; the others' steps stay delayed."""
    for residency in ("host", Tiers(1.0, 0.0), Tiers(0.5, 0.3)):
        model, optimizer, plain = both(residency=residency, compute=torch.bfloat16)
        for at in range(8):
            names = [n for n, p in model.named_parameters() if p.requires_grad]
            name = names[7 * at % len(names)]
            chunk = next(h.unit.chunk.names for h in trained(optimizer) if name in h.unit.chunk.names)
            if at % 2:  # before the pass, else before its step
                backward(model, plain, at)
            with torch.no_grad():
                dict(model.named_parameters())[name].mul_(0.25)
            plain.write(name, 0.25, chunk)
            if not at % 2:
                backward(model, plain, at)
            step(optimizer, plain)
        check(model, optimizer, plain)


def test_a_step_without_gradients_publishes_and_so_does_one_that_a_loss_scale_leaves_out():
    model, optimizer, plain = both(residency=Tiers(0.5, 0.3))
    for at in range(6):
        backward(model, plain, at)
        step(optimizer, plain)
        if at % 3 == 1:
            step(optimizer, plain)
        if at % 3 == 2:
            backward(model, plain, 50 + at)
            optimizer.inner.found_inf = torch.ones(())
            optimizer.step()
            del optimizer.inner.found_inf
            plain.skip()
    check(model, optimizer, plain)


@pytest.mark.parametrize("seed", range(20))
def test_any_loop_is_the_plain_one_bit_for_bit(seed):
    draw = random.Random(seed)
    model, optimizer, plain = both(
        draw.choice(list(OPTIMIZERS)),
        draw.choice(["host", "host", "auto", Tiers(0.5, 0.3), Tiers(1.0, 0.0)]),
        draw.choice([torch.float32, torch.bfloat16]),
    )
    most = draw.choice([1e-2, 1.0, 1.5, 1e9])
    for at in range(9):
        for part in range(draw.choice([1, 1, 1, 2, 3])):
            backward(model, plain, 100 * at + part, skip=draw.random() < 0.3)
        meddle = draw.choice(MEDDLING)
        if meddle is not None and (meddle is not read_state or at > 1):
            plain.take()
            meddle(model, optimizer, plain)
        if draw.random() < 0.15:
            optimizer.zero_grad()
            plain.zero_grad()
            continue
        if meddle is not torchs_clip and draw.random() < 0.7:
            clip(optimizer, plain, most)
        step(optimizer, plain)
        if draw.random() < 0.3:
            check(model, optimizer, plain)
    check(model, optimizer, plain)


def test_what_a_step_raises_in_the_background_is_raised(monkeypatch):
    for wait in (True, False):
        model, optimizer, plain = both()
        backward(model, plain, 0)
        step(optimizer, plain)
        optimizer.wait()

        def broken(*_):
            raise OSError("no such memory")

        monkeypatch.setattr(trained(optimizer)[0].step, "run", broken)
        backward(model, plain, 1)
        optimizer.step()
        if wait:
            with pytest.raises(OSError, match="no such memory"):
                optimizer.wait()
        else:
            loss_of(model, 2, False).backward()  # with the weights before it
            optimizer.step()
            with pytest.raises(OSError, match="no such memory"):
                loss_of(model, 3, False)


def test_what_a_step_raised_is_not_lost_where_its_weights_are_not_used(monkeypatch):
    model, optimizer, _ = both()
    held = trained(optimizer)[0]
    loss_of(model, 0, False).backward()

    def broken(*_):
        raise OSError("no such memory")

    monkeypatch.setattr(held.step, "run", broken)
    optimizer.step()
    optimizer.step()
    optimizer._engine.worker.submit(lambda: None).result()  # the host has tried
    monkeypatch.undo()
    held.set_gradient(0, torch.zeros(held.unit.kept[0].numel()))
    optimizer.step()
    with pytest.raises(OSError, match="no such memory"):
        optimizer.step()


def test_a_forward_that_fails_half_way():
    model, optimizer, plain = both()
    for at in range(4):
        backward(model, plain, at)
        step(optimizer, plain)
        with pytest.raises(RuntimeError), torch.no_grad():
            model.layers[3](torch.zeros(1, 2))
        step(optimizer, plain)
    check(model, optimizer, plain)


def test_gradients_are_not_read_while_an_optimizers_own_step_has_some_in_the_parameters():
    model, optimizer, plain = both("sgd", compute=torch.bfloat16)
    backward(model, plain, 0)
    gate = threading.Event()
    optimizer._engine.worker.submit(gate.wait)
    step(optimizer, plain)
    backward(model, plain, 1)
    threading.Timer(0.05, gate.set).start()
    for param, wanted in zip(model.parameters(), plain.gradients, strict=True):
        assert wanted is None or torch.equal(param.grad.view(wanted.shape), wanted)
    assert gate.is_set()
    step(optimizer, plain)
    check(model, optimizer, plain)


def test_sums_that_are_not_there_yet():
    """What comes first of a gradient is given up once the sum is there; new weights go elsewhere."""
    model, optimizer, plain = both(compute=torch.bfloat16)
    for at in range(5):
        gate = threading.Event()
        optimizer.wait()
        optimizer._engine.worker.submit(gate.wait)
        for part in range(2):
            backward(model, plain, 10 * at + part)
        step(optimizer, plain)
        gate.set()
    check(model, optimizer, plain)


def test_weights_are_given_up_once_no_copy_reads_them():
    class Reads:
        over = False

        def synchronize(self):
            self.over = True

    model, optimizer, plain = both()
    for at in range(2):
        backward(model, plain, at)
        reads = [Reads() for _ in trained(optimizer)]
        for held, read in zip(trained(optimizer), reads, strict=True):
            held.home._copied = read
        step(optimizer, plain)
        assert all(read.over == bool(at) for read in reads)


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", RESIDENCIES, ids=str)
@pytest.mark.parametrize("source", ["host", Tiers(0.5, 0.3)], ids=str)
def test_a_checkpoint_has_the_newest_and_loading_publishes_it(tmp_path, source, target):
    model, optimizer, plain = both(residency=source)
    for at in range(4):
        backward(model, plain, at)
        step(optimizer, plain)
    optimizer.save(tmp_path, step=4)
    other, resumed, twin = both(residency=target)
    for at in range(3):
        backward(other, twin, 30 + at)
        step(resumed, twin)
    resumed.load(tmp_path)
    plain.take()
    assert_same(other, resumed, plain)
    with torch.no_grad():
        for mine, saved in zip(twin.masters, plain.masters, strict=True):
            mine.copy_(saved)
    twin.take()
    twin.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    with torch.no_grad():
        for mine, saved in zip(twin.masters, plain.masters, strict=True):
            mine.copy_(saved)
    twin.show(twin.masters)
    for at in range(4, 8):
        backward(other, twin, at)
        step(resumed, twin)
        backward(model, plain, at)  # saving has changed nothing
        step(optimizer, plain)
    check(other, resumed, twin)
    check(model, optimizer, plain)


def test_state_dicts_resume():
    model, optimizer, plain = both()
    for at in range(3):
        backward(model, plain, at)
        step(optimizer, plain)
    other, resumed, _ = both()
    with torch.no_grad():
        for mine, saved in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(saved)
    resumed.load_state_dict(optimizer.state_dict())
    plain.take()
    plain.show(plain.masters)
    for at in range(4):
        backward(other, plain, at)
        step(resumed, plain)
    check(other, resumed, plain)


# -- memory --------------------------------------------------------------------------------------------------------


def pinned(optimizer):
    """Bytes of host memory for copies, in use or not; what is in use is gradients and weights."""
    pool, helds = optimizer._engine.copies.host, optimizer._engine.helds
    free = sum(t.nbytes for (_, _, copies), some in pool._free.items() for t in some if copies)
    found = {}
    for held in helds:
        for tensor in (held.home.weights, held.home._next, held.gradient and held.gradient.tensor):
            if tensor is not None:
                found[tensor.data_ptr()] = tensor.nbytes
    assert set(found) >= {at for at, copies in pool._lent.items() if copies}
    return free + sum(found.values())


@pytest.mark.parametrize("residency", ["host", Tiers(1.0, 0.0)], ids=str)
def test_it_takes_one_copy_of_the_weights_more(residency):
    most = {}
    for delay in (False, True):
        model, optimizer, _ = both(residency=residency, tuning=Tuning(rates=SLOW_HOST, delay=delay))
        chunks = chunk_bytes(units(fragile()), torch.float32, optimizer.inner)
        state, gate = sum(c.master + c.state for c in chunks), threading.Event()
        for at in range(8):
            if delay and at == 5:  # the host is late
                optimizer.wait()
                optimizer._engine.worker.submit(gate.wait)
            loss_of(model, at, False).backward()
            most[delay] = max(most.get(delay, 0), pinned(optimizer))
            optimizer.step()
            if at == 6:
                gate.set()
            if not delay:
                optimizer.wait()
        assert most[delay] == host_bytes(chunks, OnDisk(), delay=delay) - state
    assert most[True] - most[False] == sum(c.weights for c in chunks if c.trains)
    assert optimizer.placement().host_bytes == host_bytes(chunks, OnDisk(), delay=True)


def test_host_memory_is_asked_for_it():
    chunks = chunk_bytes(units(fragile()), None, adamw(groups(fragile())))
    for delay in (False, True):
        least = host_bytes(chunks, OnDisk(), delay=delay)
        tuning = Tuning(rates=SLOW_HOST, delay=delay)
        both(tuning=tuning, host_memory=least)
        with pytest.raises(PlanError, match=r"host memory is too small(.|\n)*" + f"{least:,}"):
            both(tuning=tuning, host_memory=least - 1)


def test_host_memory_does_not_grow_with_steps():
    """Nor where new weights cannot go where the gradient is, a sum: beside them is what comes of each backward."""
    model, optimizer, plain = both(compute=torch.bfloat16)
    most = 0
    for at in range(16):
        for part in range(1 + at % 2):
            backward(model, plain, 10 * at + part)
        if at % 3 == 0:
            assert model.head.weight.grad is not None
        step(optimizer, plain)
        optimizer.wait()
        most = max(most, pinned(optimizer))
        assert all(optimizer._engine.copies.host._lent.values()), "sums are given back"
    helds = optimizer._engine.helds
    assert most <= sum(held.sizes.weights * (4 if held.trains else 1) for held in helds)


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is no disk but memory")
def test_errors(tmp_path):
    for residency in ("nvme", Tiers(disk=0.3), Tiers(disk_weights=0.3)):
        with pytest.raises(PlanError, match=r"state on a disk are not delayed(.|\n)*asked for"):
            both(residency=residency, nvme=tmp_path)
    chunks = chunk_bytes(units(fragile()), None, adamw(groups(fragile())))
    enough = host_bytes(chunks, OnDisk(), delay=True)
    both(nvme=tmp_path, host_memory=enough)
    with pytest.raises(PlanError, match=r"state on a disk are not delayed(.|\n)*has no room"):
        both(nvme=tmp_path, host_memory=enough - 1)
    with pytest.raises(PlanError, match=r"rows of a sharded model are not delayed"):
        ChunkResidency("host", tuning=Tuning(delay=True))
