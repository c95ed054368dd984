"""Checkpoints of offloaded models: chunk by chunk, from every residency into every other, whole or not at all."""

from __future__ import annotations

import pytest
import torch
from offloaded import SLOW_HOST, Net, adamw, assert_equal, build, groups, train
from offloaded_to_disk import OPTIMIZERS, in_memory, moved, on_disk

from cai_gemini import Tiers, Tuning, offload
from cai_gemini.chunk.disk_state import DiskState
from cai_mesh import checkpoint
from cai_mesh.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.*is no disk but memory")

KINDS = ["nvme", "host", "device", Tiers(0.5, 0.3, disk=0.5, disk_weights=0.3), Tiers(0.4, 0.2, streamed=0.5)]
MAKERS = {"adamw": adamw, "sgd": OPTIMIZERS["sgd"], "amsgrad": OPTIMIZERS["amsgrad"]}


def made(place, residency, maker="adamw", **options):
    return moved(*build(optimizer=lambda p: MAKERS[maker](p)), place, residency, **options)


@pytest.mark.parametrize("target", KINDS, ids=str)
@pytest.mark.parametrize("source", KINDS, ids=str)
def test_a_resume_is_bit_for_bit_across_residencies(tmp_path, source, target):
    twin, theirs = build()
    train(twin, theirs, steps=3)
    model, ours = made(tmp_path, source)
    train(model, ours, steps=3)
    assert ours.save(tmp_path / "saved", step=3).name == "step-3"
    other, resumed = made(tmp_path, target)
    train(other, resumed, steps=2)
    resumed.load(tmp_path / "saved")
    expected = train(twin, theirs, steps=3)
    assert train(other, resumed, steps=3) == expected
    assert train(model, ours, steps=3) == expected, "saving changed what was saved"
    assert_equal(other, twin)


@pytest.mark.parametrize("residency", ["nvme", "host"])
@pytest.mark.parametrize("maker", ["sgd", "amsgrad"])
@pytest.mark.parametrize("steps", [0, 2])
def test_state_that_is_not_there_yet_is_made(tmp_path, residency, maker, steps):
    twin, theirs = build(optimizer=lambda p: MAKERS[maker](p))
    train(twin, theirs, steps=steps)
    model, ours = made(tmp_path, "nvme", maker)
    train(model, ours, steps=steps)
    ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.03
    ours.save(tmp_path / "saved", step=steps)
    fresh, resumed = made(tmp_path, residency, maker)
    resumed.load(tmp_path / "saved")
    assert resumed.param_groups[0]["lr"] == 0.03
    assert train(fresh, resumed, steps=2) == train(twin, theirs, steps=2)
    assert_equal(fresh, twin)


def test_names_and_shapes_are_the_models_own(tmp_path):
    model, ours = made(tmp_path, "nvme")
    train(model, ours, steps=1)
    path = ours.save(tmp_path / "saved", step=1)
    plain, theirs = build()
    train(plain, theirs, steps=1)
    state = {f"model.{name}": torch.full_like(param, 7.0) for name, param in plain.named_parameters()}
    for name, param in plain.named_parameters():
        for slot, value in theirs.state.get(param, {}).items():
            state[f"optimizer.{name}.{slot}"] = torch.full_like(value, 7.0)
    assert checkpoint.contents(path).tensors.keys() == state.keys()
    checkpoint.load(path, state)
    for name, param in plain.named_parameters():
        assert torch.equal(state[f"model.{name}"], param.detach()), name
        for slot, value in theirs.state.get(param, {}).items():
            assert torch.equal(state[f"optimizer.{name}.{slot}"], value), (name, slot)


def test_one_chunk_is_in_memory_at_a_time(tmp_path, monkeypatch):
    model, ours = made(tmp_path, "nvme")
    train(model, ours, steps=2)
    ours.wait()
    load, loaded, most = DiskState.load, [], []

    def watched(disk):
        before = disk.in_memory
        load(disk)
        loaded.extend([] if before else [disk])
        most.append(sum(in_memory(chunk) > 8 * 40 for chunk in on_disk(ours)))

    monkeypatch.setattr(DiskState, "load", watched)
    ours.save(tmp_path / "saved", step=2)
    assert len(loaded) == 6, "a chunk was read more than once"
    assert max(most) == 1
    ours.load(tmp_path / "saved")
    assert len(loaded) == 12
    assert max(most) == 1
    assert not any(chunk.disk.in_memory for chunk in on_disk(ours))


def test_a_save_that_is_cut_short_leaves_the_last_one(tmp_path, monkeypatch):
    twin, theirs = build()
    train(twin, theirs, steps=1)
    model, ours = made(tmp_path, "nvme")
    train(model, ours, steps=1)
    ours.save(tmp_path / "saved", step=1)
    train(model, ours, steps=1)
    load, calls = DiskState.load, []

    def broken(disk):
        calls.append(disk)
        if len(calls) > 3:
            raise OSError("power failure")
        load(disk)

    monkeypatch.setattr(DiskState, "load", broken)
    with pytest.raises(CheckpointError, match="power failure"):
        ours.save(tmp_path / "saved", step=2)
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path / "saved").name == "step-1"
    ours.load(tmp_path / "saved")
    assert train(model, ours, steps=2) == train(twin, theirs, steps=2)


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path):
    model, ours = made(tmp_path, "nvme")
    train(model, ours, steps=1)
    ours.save(tmp_path / "saved", step=1)
    twin, theirs = build()
    net = Net()
    net.layers[4].up, net.layers[4].down = torch.nn.Linear(6, 13), torch.nn.Linear(13, 6)
    wider, wide = moved(net, adamw(groups(net)), tmp_path)
    before = [p.detach().clone() for p in wider.parameters()]
    with pytest.raises(CheckpointError, match=r"another model(.|\n)*layers\.4\.\w+\.weight"):
        wide.load(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(before, wider.parameters(), strict=True))
    one, single = build()
    single = moved(one, adamw([{"params": one.parameters()}]), tmp_path)[1]
    with pytest.raises(CheckpointError, match=r"another optimizer(.|\n)*2 param groups"):
        single.load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"another optimizer(.|\n)*betas(.|\n)*momentum"):
        made(tmp_path, "nvme", "sgd")[1].load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        ours.load(tmp_path / "none")
    file = next((tmp_path / "saved" / "step-1").glob("*.distcp"))
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError):
        ours.load(tmp_path / "saved")
    train(twin, theirs, steps=1)
    assert train(model, ours, 2) == train(twin, theirs, 2)


def test_between_a_backward_and_its_step_it_is_what_the_last_step_left(tmp_path):
    def backward(net):
        ids = torch.arange(6).view(2, 3)
        net(ids, False).square().mean().backward()

    twin, theirs = build()
    model, ours = offload(*build(), residency="host", device_memory="80KB", tuning=Tuning(rates=SLOW_HOST))
    for net, opt in ((twin, theirs), (model, ours)):
        train(net, opt, steps=3, micro=1)
        backward(net)
    path = ours.save(tmp_path / "saved", step=3)
    other, resumed = made(tmp_path, "nvme")
    resumed.load(path)
    assert_equal(other, twin)
    expected = theirs.state_dict()["state"]
    got = resumed.state_dict()["state"]
    for index, state in expected.items():
        for slot, value in state.items():
            assert torch.equal(value.flatten(), got[index][slot].flatten()), (index, slot)
    for opt in (theirs, ours):
        opt.step()
    assert_equal(model, twin)
