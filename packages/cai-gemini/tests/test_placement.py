"""What stays where is counted as it is, and what is kept there can be saved and loaded by name."""

from __future__ import annotations

import pytest
import torch
from offloaded import Net, assert_equal, build, train

from cai_gemini import Tiers, offload
from cai_mesh import checkpoint
from cai_mesh.layout import BoxedTensor

MIXED = Tiers(weights=0.6, state=0.3)


@pytest.mark.parametrize("residency", ["host", MIXED, "device"])
def test_bytes_on_the_device_are_those_of_the_ledger(residency):
    model, opt = offload(*build(), residency=residency, device="cpu")
    opt.zero_grad()
    before = opt.placement()
    assert not before.planned
    assert (before.chunks, before.state_chunks, before.state_stays) == (6, 5, 0)
    train(model, opt, steps=3)
    opt.wait()
    found = opt.placement()
    assert found.planned
    nbytes = opt._engine.ledger.nbytes
    staying = sum(chunk.sizes.weights for chunk in opt._engine.chunks if chunk.stays)
    assert found.device_bytes == staying + nbytes["state"] + nbytes["gradients"]
    wanted = {"host": (1, 0), "device": (6, 5)}.get(residency) if isinstance(residency, str) else None
    if wanted is not None:
        assert (found.weights_stay, found.state_stays) == wanted
    else:
        assert found.device_bytes > staying
        assert 1 < found.weights_stay < 6
        assert 0 < found.state_stays < 5


def test_bytes_on_the_host(tmp_path):
    """In float32: 4 for the copy that goes to the device, 4 of gradient, 12 of state; 8 where nothing is trained.

    On a disk master weights serve as the copy, unless that has another dtype; gradients stay.
    """
    _, opt = offload(*build(), residency="host", device="cpu")
    trained, frozen = (
        sum(chunk.unit.chunk.numel for chunk in opt._engine.chunks if (chunk.step is not None) is trains)
        for trains in (True, False)
    )
    assert opt.placement().host_bytes == 20 * trained + 8 * frozen
    assert opt.placement().disk_bytes == 0
    on_disk = {"residency": "nvme", "nvme": tmp_path, "device": "cpu"}
    _, opt = offload(*build(), **on_disk)
    assert opt.placement().host_bytes == 4 * trained
    assert opt.placement().disk_bytes == 12 * trained + 4 * frozen
    _, opt = offload(*build(), **on_disk, compute=torch.bfloat16)
    assert opt.placement().host_bytes == 2 * trained
    assert opt.placement().disk_bytes == 12 * trained + 4 * frozen + 2 * (trained + frozen)
    _, opt = offload(*build(), residency=Tiers(disk=1.0), nvme=tmp_path, device="cpu")
    assert opt.placement().host_bytes == 8 * trained + 8 * frozen
    assert (opt.placement().disk_bytes, opt.placement().state_on_disk) == (12 * trained, 5)
    assert "5 on the disk" in str(opt.placement())


def state_of(model, opt):
    state = {name: BoxedTensor.from_param(p) for name, p in model.named_parameters()}
    for name, param in model.named_parameters():
        state |= opt.boxed_state(param, name)
    return state


@pytest.mark.parametrize("saved, loaded", [("host", "device"), ("device", "nvme"), ("nvme", "host")])
def test_state_by_name_goes_through_a_checkpoint(saved, loaded, tmp_path):
    twin, plain = build()
    train(twin, plain, steps=3)
    expected = train(twin, plain)
    options = {"device": "cpu", "nvme": tmp_path}
    model, opt = offload(*build(), residency=saved, **options)
    train(model, opt, steps=3)
    checkpoint.save(tmp_path / "saved", state_of(model, opt), step=3)
    model, opt = offload(*build(), residency=loaded, **options)
    checkpoint.load(tmp_path / "saved", state_of(model, opt))
    assert train(model, opt) == expected
    assert_equal(model, twin)


def test_a_frozen_or_strange_parameter_has_no_state():
    model, opt = offload(*build(), residency="host", device="cpu")
    assert opt.boxed_state(next(model.layers[1].parameters())) == {}
    assert opt.boxed_state(next(Net().parameters())) == {}
    assert set(opt.boxed_state(model.layers[0].up.weight, "up")) == {"up.step", "up.exp_avg", "up.exp_avg_sq"}


def test_another_optimizer_has_the_state_it_has_made():
    model, opt = offload(
        *build(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)), residency="host", device="cpu"
    )
    assert opt.boxed_state(model.layers[0].up.weight, "up") == {}
    train(model, opt, steps=1)
    boxed = opt.boxed_state(model.layers[0].up.weight, "up")
    assert set(boxed) == {"up.momentum_buffer"}
    assert boxed["up.momentum_buffer"].global_shape == (12, 6)
