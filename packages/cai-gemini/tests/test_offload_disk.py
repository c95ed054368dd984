"""Weights and state on a disk: the same training, bit for bit; a failing disk is an error, never other weights."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import threading
import weakref

import pytest
import torch
from disks import Disk, fails, within
from offloaded import (
    adamw,
    assert_equal,
    build,
    groups,
    skipped,
    torchs_clip,
    train,
    train_with_a_late_branch,
)
from offloaded_to_disk import MIXES, OPTIMIZERS, in_memory, moved, on_disk
from torch import nn

from cai_gemini import Tiers, offload
from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.chunk.states import State
from cai_gemini.memory import pinned
from cai_gemini.nvme import NvmeError, store
from cai_gemini.planning import disk_plan
from cai_gemini.planning.disk_plan import ChunkBytes, OnDisk, choose, chunk_bytes, disk_bytes, host_bytes
from cai_gemini.planning.policy import StepPlace
from cai_mesh.errors import PlanError
from cai_mesh.storage import units

pytestmark = pytest.mark.filterwarnings("ignore:.*is no disk but memory")


class BfloatTwin:
    """Computes in bfloat16, over float32 masters that a fused AdamW steps; gradients are summed in float32."""

    def __init__(self):
        self.model, self.optimizer = build()
        self.net = copy.deepcopy(self.model).to(torch.bfloat16)

    def train(self, steps, micro):
        losses = []
        for step in range(steps):
            pairs = list(zip(self.model.parameters(), self.net.parameters(), strict=True))
            with torch.no_grad():
                for master, param in pairs:
                    param.copy_(master)
            for part in range(micro):
                ids = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(10 * step + part))
                logits = self.net(ids, skipped(step)).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, ids.flatten())
                loss.backward()
                losses.append(loss.item())
                for master, param in pairs:
                    if param.grad is not None:
                        more = param.grad.float()
                        master.grad = more if master.grad is None else master.grad + more
                        param.grad = None
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses


@pytest.mark.parametrize("residency", MIXES, ids=str)
@pytest.mark.parametrize(("micro", "clip"), [(1, None), (2, torchs_clip)])
def test_training_is_that_without_offload_bit_for_bit(tmp_path, residency, micro, clip):
    twin, theirs = build()
    expected = train(twin, theirs, micro=micro, clip=clip)
    model, ours = moved(*build(), tmp_path, residency)
    assert on_disk(ours)
    assert train(model, ours, micro=micro, clip=clip) == expected
    assert_equal(model, twin)


@pytest.mark.parametrize("residency", MIXES, ids=str)
@pytest.mark.parametrize("micro", [1, 2])
def test_bfloat16_is_that_over_masters_in_memory_bit_for_bit(tmp_path, residency, micro):
    twin = BfloatTwin()
    expected = twin.train(5, micro)
    model, ours = moved(*build(), tmp_path, residency, compute=torch.bfloat16)
    assert train(model, ours, steps=5, micro=micro) == expected
    assert_equal(model, twin.model)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("residency", ["nvme", Tiers(0.5, 0.2, disk=0.8, disk_weights=0.4)], ids=str)
def test_any_elementwise_optimizer(tmp_path, name, residency):
    twin, theirs = build(optimizer=OPTIMIZERS[name])
    expected = train(twin, theirs)
    model, ours = moved(*build(optimizer=OPTIMIZERS[name]), tmp_path, residency)
    assert train(model, ours) == expected
    ours.wait()
    for chunk in on_disk(ours):
        assert in_memory(chunk) <= 8 * (1 + 4 * len(chunk.unit.kept)), "state stayed in memory"
    assert_equal(model, twin)
    expected, got = theirs.state_dict()["state"], ours.state_dict()["state"]
    assert got.keys() == expected.keys()
    for index, state in expected.items():
        assert got[index].keys() == state.keys()
        for key, value in state.items():
            other = got[index][key]
            assert value is other or torch.equal(value.flatten(), other.flatten()), key


@pytest.mark.parametrize("name", ["sgd", "amsgrad"])
def test_a_branch_taken_for_the_first_time(tmp_path, name):
    """Its chunk gets its state, and what holds it on the disk, steps later than the others."""

    twin, theirs = build(optimizer=OPTIMIZERS[name])
    expected = train_with_a_late_branch(twin, theirs)
    model, ours = moved(*build(optimizer=OPTIMIZERS[name]), tmp_path, compute=torch.float32)
    assert train_with_a_late_branch(model, ours) == expected
    assert_equal(model, twin)


@pytest.mark.parametrize("optimizer", [adamw, OPTIMIZERS["amsgrad"]], ids=["adamw", "amsgrad"])
def test_a_chunk_is_stepped_in_parts(tmp_path, optimizer):
    """Parameters of a chunk whose gradient was dropped keep their value and have no state yet, also when read."""

    def drop(model, opt):
        model.layers[3].up.weight.grad = None
        model.layers[4].norm.bias.grad = None

    def run(model, opt):
        losses = train(model, opt, 2, clip=drop)
        values = [param.flatten().sum().item() for param in model.parameters()]
        return values, losses + train(model, opt, 2)

    twin, theirs = build(optimizer=lambda p: optimizer(p))
    model, ours = moved(*build(optimizer=lambda p: optimizer(p)), tmp_path)
    assert run(model, ours) == run(twin, theirs)
    assert_equal(model, twin)


def test_parts_of_a_chunk_that_are_not_stepped_keep_their_weights(tmp_path):
    def drop(model, opt):
        model.layers[3].up.weight.grad = None

    host, theirs = moved(*build(), tmp_path, "host", compute=torch.bfloat16)
    model, ours = moved(*build(), tmp_path, compute=torch.bfloat16)
    assert train(model, ours, 4, clip=drop) == train(host, theirs, 4, clip=drop)
    assert_equal(model, host)


def test_values_leave_memory_and_come_back_when_read(tmp_path):
    model, ours = moved(*build(), tmp_path)
    train(model, ours, steps=2)
    chunks = on_disk(ours)
    assert len(chunks) == 6  # every chunk, the frozen one too
    assert all(in_memory(chunk) <= 8 * (1 + 2 * len(chunk.unit.kept)) for chunk in chunks)
    assert all(chunk.host_weights.tensor.numel() == 0 for chunk in chunks)
    twin, theirs = build()
    train(twin, theirs, steps=2)
    assert_equal(model, twin)  # reads all of them
    assert all(chunk.unit.shard.untyped_storage().nbytes() > 8 for chunk in chunks)
    train(model, ours, steps=1)
    assert all(chunk.unit.shard.untyped_storage().nbytes() <= 8 for chunk in chunks)


@pytest.mark.parametrize("residency", MIXES, ids=str)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_written_while_it_is_loaded_goes_back(tmp_path, residency, compute):
    """Between steps, and between a backward and its step, frozen and unused parameters too."""
    twin, theirs = moved(*build(), tmp_path, "host", compute=compute)
    model, ours = moved(*build(), tmp_path, residency, compute=compute)

    def halve(net, opt):
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(0.5)

    def run(net, opt):
        losses = train(net, opt, steps=3)
        halve(net, opt)
        for state in opt.state.values():
            state["exp_avg"].mul_(0.25)
        return losses + train(net, opt, steps=3) + train(net, opt, steps=2, clip=halve)

    assert run(model, ours) == run(twin, theirs)
    assert_equal(model, twin)


@pytest.mark.parametrize("residency", ["device", Tiers(0.6, 0.4), Tiers(0.6, 0.4, disk=0.6)], ids=str)
def test_what_is_written_right_before_the_plan_is_seen(tmp_path, residency):
    """By a chunk that is on the device, is not stepped, and whose state moves there."""

    def halve(net, opt):
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(0.5)
        for param in net.layers[0].parameters():
            param.grad = None

    def run(net, opt):
        return train(net, opt, steps=2, clip=halve) + train(net, opt, steps=2)

    twin, theirs = build()
    model, ours = moved(*build(), tmp_path, residency)
    assert run(model, ours) == run(twin, theirs)
    assert ours._engine.chunks[0].place is StepPlace.DEVICE
    assert_equal(model, twin)


def test_frozen_weights_are_never_written_again(tmp_path):
    model, ours = moved(*build(), tmp_path, compute=torch.bfloat16)
    frozen = [chunk for chunk in on_disk(ours) if chunk.step is None]
    regions = [r for chunk in frozen for r in (chunk.disk.master, chunk.host_weights.disk.own)]
    writes = [region._contents.last_write for region in regions]
    train(model, ours, steps=3)
    ours.state_dict(), [p.sum() for p in model.parameters()]
    train(model, ours, steps=3)
    assert len(regions) == 2
    assert all(region._contents.last_write is write for region, write in zip(regions, writes, strict=True))


def test_float32_weights_are_on_the_disk_once(tmp_path):
    model, ours = moved(*build(), tmp_path)
    train(model, ours, steps=1)
    assert all(chunk.host_weights.disk.own is None for chunk in on_disk(ours))
    sizes = chunk_bytes(units(build()[0]), None, build()[1])
    everything = frozenset(range(len(sizes)))
    trained = frozenset(i for i in everything if sizes[i].trains)
    expected = disk_bytes(sizes, OnDisk(trained, everything))
    assert expected == sum(r.nbytes for chunk in on_disk(ours) for r in chunk.disk_regions())


@pytest.mark.parametrize("residency", ["nvme", Tiers(disk=0.5), "device"], ids=str)
@pytest.mark.parametrize("optimizer", [adamw, OPTIMIZERS["amsgrad"]], ids=["adamw", "amsgrad"])
def test_a_resume_through_state_dicts(tmp_path, residency, optimizer):
    twin, theirs = build(optimizer=lambda p: optimizer(p))
    train(twin, theirs, steps=3)
    model, ours = moved(*build(optimizer=lambda p: optimizer(p)), tmp_path)
    train(model, ours, steps=3)
    saved = {n: p.detach().clone() for n, p in model.named_parameters()}
    other, resumed = moved(*build(optimizer=lambda p: optimizer(p)), tmp_path, residency)
    train(other, resumed, steps=1)
    with torch.no_grad():
        for name, param in other.named_parameters():
            param.copy_(saved[name])
    resumed.load_state_dict(ours.state_dict())
    assert train(other, resumed, steps=3) == train(twin, theirs, steps=3)
    assert_equal(other, twin)


def test_state_from_before_comes_along(tmp_path):
    for optimizer in (adamw, OPTIMIZERS["amsgrad"]):
        twin, theirs = build(optimizer=lambda p, make=optimizer: make(p))
        model, opt = build(optimizer=lambda p, make=optimizer: make(p))
        assert train(model, opt, 2) == train(twin, theirs, 2)
        model, ours = moved(model, opt, tmp_path)
        assert train(model, ours, 3) == train(twin, theirs, 3)
        assert_equal(model, twin)


def test_an_empty_state_dict_starts_again(tmp_path):
    twin, theirs = build()
    model, ours = moved(*build(), tmp_path)
    fresh = build()[1].state_dict()
    for net, opt in ((twin, theirs), (model, ours)):
        train(net, opt, 2)
        opt.load_state_dict(fresh)
    assert train(model, ours, 2) == train(twin, theirs, 2)


# -- memory --------------------------------------------------------------------------------------------------------


def sizes():
    return chunk_bytes(units(build()[0]), torch.bfloat16, build()[1])


def test_auto_takes_the_disk_for_what_host_memory_lacks(tmp_path, monkeypatch):
    """State first, then weights; less than that is refused with what would do."""
    monkeypatch.setattr(disk_plan, "PAGE", 128)  # the sizes here are small
    every = sizes()
    trained = frozenset(i for i, chunk in enumerate(every) if chunk.trains)
    everything, states = host_bytes(every, OnDisk()), host_bytes(every, OnDisk(trained))
    least = host_bytes(every, OnDisk(trained, frozenset(range(len(every)))))
    assert least < states < everything
    plain, theirs = moved(*build(), tmp_path, "auto", compute=torch.bfloat16, host_memory=everything)
    expected = train(plain, theirs)
    assert not on_disk(theirs)
    for memory, state, weights in ((everything - 1, 1, 0), (states, 5, 0), (least, 6, 6)):
        model, ours = moved(*build(), tmp_path, "auto", compute=torch.bfloat16, host_memory=memory)
        found = on_disk(ours)
        assert state <= len(found) <= max(state, 5)
        assert sum(chunk.host_weights.disk is not None for chunk in found) == weights
        assert train(model, ours) == expected
    with pytest.raises(PlanError, match=rf"host memory is too small(.|\n)*{least:,} bytes"):
        moved(*build(), tmp_path, "auto", compute=torch.bfloat16, host_memory=least - 1)


def test_chunks_used_last_go_first_and_no_more_than_needed():
    one = ChunkBytes(10**6, 4 * 10**6, 8 * 10**6, 2 * 10**6, trains=True, shared=False)
    sizes = [one, ChunkBytes(10**6, 4 * 10**6, 0, 2 * 10**6, trains=False, shared=False), *[one] * 8]
    trained = [9, 8, 7, 6, 5, 4, 3, 2, 0]
    before = None
    for disk in _orders(trained, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]):
        needed = host_bytes(sizes, disk)
        if before is None or needed < before:
            assert choose(sizes, 0.0, 0.0, needed, disk=True) == disk
            before = needed
    assert before == host_bytes(sizes, OnDisk(frozenset(trained), frozenset(range(10))))
    assert choose(sizes, 0.3, 0.15, None, disk=True) == OnDisk(frozenset({9, 8, 7}), frozenset({9, 8}))
    assert choose(sizes, 0.0, 0.85, None, disk=True).weights == frozenset(range(1, 10))
    with pytest.raises(PlanError, match="or pass nvme"):
        choose(sizes, 0.0, 0.0, host_bytes(sizes, OnDisk()) - 1, disk=False)


def _orders(states, weights):
    found = [OnDisk()]
    for i in states:
        found.append(OnDisk(found[-1].state | {i}))
    for i in weights:
        found.append(OnDisk(found[-1].state, found[-1].weights | {i}))
    return found


@pytest.mark.parametrize("residency", ["host", *MIXES[:2], MIXES[3]], ids=str)
def test_host_memory_held_is_what_was_counted(tmp_path, monkeypatch, residency):
    used, lock = {"now": 0, "most": 0}, threading.Lock()

    def add(nbytes):
        with lock:
            used["now"] += nbytes
            used["most"] = max(used["most"], used["now"])

    def counted(make):
        def made(*arguments):
            tensor = make(*arguments)
            add(tensor.nbytes)
            weakref.finalize(tensor, add, -tensor.nbytes)
            return tensor

        return made

    monkeypatch.setattr(store, "aligned", counted(store.aligned))
    monkeypatch.setattr(pinned, "host_memory", counted(pinned.host_memory))
    model, ours = moved(*build(), tmp_path, residency, compute=torch.bfloat16)
    train(model, ours, steps=4, micro=1)
    ours.wait()
    chunks = ours._engine.chunks
    disk = OnDisk(
        frozenset(i for i, h in enumerate(chunks) if h.disk is not None and h.step is not None),
        frozenset(i for i, h in enumerate(chunks) if h.host_weights.disk is not None),
    )
    bound = host_bytes(sizes(), disk)
    apart = sum(c.master + c.state for i, c in enumerate(sizes()) if i not in disk.every)
    assert used["most"] + apart <= bound
    assert used["most"] + apart > 0.6 * bound, "the count is far from what is used"


def test_a_chunk_is_on_the_disk_before_the_next_is_made(tmp_path, monkeypatch):
    """So that a model larger than host memory can be made, from the meta device."""
    with torch.device("meta"):
        model = build()[0]
    model.layers[1].requires_grad_(False)
    values, made, seen = dict(build()[0].named_parameters()), [], []
    init = OffloadedChunk.__init__

    def watched(chunk, *arguments):
        seen.append(max([in_memory(other) for other in made], default=0))
        init(chunk, *arguments)
        made.append(chunk)

    monkeypatch.setattr(OffloadedChunk, "__init__", watched)
    twin, theirs = build()
    options = {"device": "cpu", "materialize": lambda name, _: values[name].detach()}
    model, ours = moved(model, adamw(groups(model)), tmp_path, **options)
    assert len(seen) == 6
    assert max(*seen, *(in_memory(chunk) for chunk in made)) <= 8 * 13
    assert train(model, ours, 2) == train(twin, theirs, 2)


# -- faults --------------------------------------------------------------------------------------------------------


def broken(optimizer, **faults):
    """Let the system calls of the store do as `faults` say from now on."""
    optimizer.wait()
    optimizer._engine.store._file._sys = Disk(**faults)


def flipped(descriptor, buffers, offset):
    """A disk that returns other bytes than were written."""
    count = os.preadv(descriptor, buffers, offset)
    buffers[0][7] ^= 1
    return count


@pytest.mark.parametrize("part", ["weights", "master weights", "exp_avg_sq"])
@pytest.mark.parametrize(
    ("call", "fault"),
    [("preadv", fails(errno.EIO)), ("preadv", flipped), ("pwritev", fails(errno.ENOSPC))],
    ids=["read", "flip", "write"],
)
def test_a_failing_disk_is_an_error_that_names_path_and_parameter(tmp_path, part, call, fault):
    twin = BfloatTwin()
    expected = twin.train(6, 1)
    model, ours = moved(*build(), tmp_path, compute=torch.bfloat16)
    losses = train(model, ours, steps=2, micro=1)
    chunk = next(h for h in on_disk(ours) if "layers.3" in h.name)
    region = {r.name: r for r in chunk.disk_regions()}[f"{chunk.name} ({part})"]
    broken(ours, **{call: within(region, fault)})

    def go_on():
        for step in range(2, 6):
            ids = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(10 * step))
            loss = nn.functional.cross_entropy(model(ids, skipped(step)).flatten(0, 1), ids.flatten())
            losses.append(loss.item())
            loss.backward()
            ours.step()
            ours.zero_grad()

    with pytest.raises(NvmeError) as caught:
        go_on()
    assert region.name in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert losses == expected[: len(losses)], "trained on with other weights"
    if call == "pwritev" and part == "weights":
        chunk._copy_when_stepped()
        with pytest.raises(NvmeError, match="holds nothing that may be used"):
            chunk.arrive()


def test_the_loop_does_not_wait_for_reads(tmp_path):
    model, ours = moved(*build(), tmp_path)
    train(model, ours, steps=1)
    gate = threading.Event()
    broken(ours, preadv=lambda *_: gate.wait() and None)
    chunks = [h for h in ours._engine.chunks if h.state is State.FREE]
    assert len(chunks) > 2  # more than there are buffers
    for chunk in chunks:
        chunk.bring()
    assert not any(chunk._coming.done() for chunk in chunks)
    gate.set()
    for chunk in chunks:
        chunk.arrive()
        assert torch.equal(chunk.unit.weights.data, chunk.unit.shard) or not chunk.disk.in_memory


def test_errors(tmp_path, monkeypatch):
    model, opt = build()
    for residency in ("nvme", Tiers(disk_weights=0.1)):
        with pytest.raises(PlanError, match="no directory"):
            offload(model, opt, residency=residency, device_memory="80KB")
    with pytest.raises(NvmeError, match="absent"):
        moved(model, opt, tmp_path / "absent")
    for tiers in ((1.0, 0.6, 0.6), (1.0, 0.6, 0.0, 0.6)):
        with pytest.raises(PlanError, match="more state than there is"):
            Tiers(*tiers)
    with pytest.raises(PlanError, match="disk_weights is no fraction"):
        Tiers(disk_weights=2.0)
    needed = disk_bytes(sizes(), choose(sizes(), 1.0, 1.0, None, disk=True))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(PlanError, match=rf"no room for state and weights(.|\n)*{needed:,} bytes"):
        moved(model, opt, tmp_path, compute=torch.bfloat16)
    assert type(next(model.parameters())) is torch.nn.Parameter, "a refused model was touched"
    moved(*build(), tmp_path, Tiers(disk=1.0), compute=torch.bfloat16)
