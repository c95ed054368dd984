"""Optimizer state on a disk: the same training, bit for bit; a failing disk is an error, never other weights."""

from __future__ import annotations

import errno

import pytest
import torch
from offloaded import SLOW_HOST, Net, adamw, assert_equal, build, groups, train

from cai_gemini import Tiers, Tuning, offload
from cai_gemini.nvme import NvmeError
from cai_mesh.errors import PlanError

pytestmark = pytest.mark.filterwarnings("ignore:.*is no disk but memory")


def moved(model, opt, place, residency="nvme", **options):
    tuning = Tuning(rates=SLOW_HOST)
    return offload(
        model, opt, residency=residency, device_memory="80KB", nvme=place, tuning=tuning, **options
    )


def on_disk(optimizer):
    return [held for held in optimizer._engine.helds if held.disk is not None]


@pytest.mark.parametrize("residency", ["nvme", Tiers(1.0, 0.3, 0.4), Tiers(disk=0.5)], ids=str)
@pytest.mark.parametrize("micro", [1, 2])
def test_training_is_that_without_offload_bit_for_bit(tmp_path, residency, micro):
    twin, theirs = build()
    expected = train(twin, theirs, micro=micro)
    model, ours = moved(*build(), tmp_path, residency)
    assert on_disk(ours)
    assert train(model, ours, micro=micro) == expected
    assert_equal(model, twin)


def test_values_leave_memory_and_come_back_when_read(tmp_path):
    model, ours = moved(*build(), tmp_path)
    train(model, ours, steps=2)
    helds = on_disk(ours)
    assert len(helds) == 5  # every trained chunk
    assert all(held.unit.shard.untyped_storage().nbytes() <= 8 for held in helds)
    twin, theirs = build()
    train(twin, theirs, steps=2)
    assert_equal(model, twin)  # reads all of them
    assert all(held.unit.shard.untyped_storage().nbytes() > 8 for held in helds)
    train(model, ours, steps=1)
    assert all(held.unit.shard.untyped_storage().nbytes() <= 8 for held in helds)


def test_what_is_written_while_it_is_lent_goes_back(tmp_path):
    twin, theirs = build()
    model, ours = moved(*build(), tmp_path)
    expected = train(twin, theirs, steps=2)
    assert train(model, ours, steps=2) == expected
    with torch.no_grad():
        for net in (twin, model):
            for param in net.parameters():
                param.mul_(0.5)
    for opt in (theirs, ours):
        for state in opt.state.values():
            state["exp_avg"].mul_(0.25)
    assert train(model, ours, steps=3) == train(twin, theirs, steps=3)
    assert_equal(model, twin)


def test_a_resume_through_state_dicts(tmp_path):
    twin, theirs = build()
    train(twin, theirs, steps=3)
    model, ours = moved(*build(), tmp_path)
    train(model, ours, steps=3)
    saved = {n: p.detach().clone() for n, p in model.named_parameters()}
    other, resumed = moved(*build(), tmp_path, Tiers(disk=0.5))
    with torch.no_grad():
        for name, param in other.named_parameters():
            param.copy_(saved[name])
    resumed.load_state_dict(ours.state_dict())
    assert train(other, resumed, steps=3) == train(twin, theirs, steps=3)
    assert_equal(other, twin)


def test_auto_takes_the_disk_for_what_host_memory_lacks(tmp_path):
    size = sum(p.numel() for p in Net().parameters()) * 4
    model, ours = moved(*build(), tmp_path, "auto", host_memory=int(3.5 * size))
    assert 0 < len(on_disk(ours)) < 5
    plain, opt = moved(*build(), tmp_path, "auto", host_memory=10 * size)
    assert not on_disk(opt)
    assert train(model, ours) == train(plain, opt)
    with pytest.raises(PlanError, match=r"host memory is too small(.|\n)*[\d,]+ bytes"):
        moved(*build(), tmp_path, "auto", host_memory=size)


class Broken:
    """Reads of the store's file fail from now on."""

    def __init__(self, store, monkeypatch):
        def fail(*_):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(store._file, "read", fail)


def test_a_failing_disk_is_an_error_that_names_the_parameter(tmp_path, monkeypatch):
    model, ours = moved(*build(), tmp_path)
    train(model, ours, steps=2)
    ours.wait()
    Broken(ours._engine.store, monkeypatch)
    with pytest.raises(NvmeError, match=r"layers\.\d|embed"):
        train(model, ours, steps=2)


def test_errors(tmp_path):
    model, opt = build()
    with pytest.raises(PlanError, match="no directory"):
        offload(model, opt, residency="nvme", device_memory="80KB")
    with pytest.raises(NvmeError, match="absent"):
        moved(model, opt, tmp_path / "absent")
    with pytest.raises(PlanError, match="more state than there is"):
        Tiers(1.0, 0.6, 0.6)
    with pytest.raises(PlanError, match=r"is Adam's(.|\n)*SGD"):
        moved(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    with pytest.raises(PlanError, match=r"is Adam's(.|\n)*without amsgrad"):
        moved(model, torch.optim.AdamW(model.parameters(), amsgrad=True), tmp_path)
    assert type(next(model.parameters())) is torch.nn.Parameter, "a refused model was touched"
    assert adamw(groups(model)).param_groups
