"""What is frozen at first and trained later, and groups added on the way, wherever chunks live: as plain."""

from __future__ import annotations

import pytest
import torch
from offloaded import adamw, assert_equal, build, moved, torchs_clip, train

from cai_gemini import Tiers
from cai_gemini.planning.policy import StepPlace
from cai_mesh.errors import PlanError

PLACES = [
    "auto",
    "host",
    "device",
    "nvme",
    Tiers(0.5, 0.2, streamed=0.6),
    Tiers(0.4, 0.3, disk=0.7),
    Tiers(0.6, 0.3, disk=0.4, disk_weights=0.5),
]
MEMORY = {False: "80KB", True: "1MB"}


def unfrozen_in_turns(model, optimizer, clip):
    """Block 1 is frozen at first (`Net`), block 3 and half of block 4 here before; the plan is made in between."""
    found = train(model, optimizer, 1, clip=clip)
    model.layers[1].requires_grad_(True)
    found += train(model, optimizer, 3, clip=clip)
    model.layers[4].up.requires_grad_(True)
    found += train(model, optimizer, 1, clip=clip)
    model.requires_grad_(True)
    model.layers[0].requires_grad_(False)
    return found + train(model, optimizer, 3, clip=clip)


def frozen(model):
    model.layers[3].requires_grad_(False)
    model.layers[4].requires_grad_(False)
    return model


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("residency", PLACES, ids=str)
def test_what_is_unfrozen_is_trained(residency, recompute, tmp_path):
    model, inner = build(recompute)
    wanted = unfrozen_in_turns(frozen(model), inner, None)
    ours, inner = build(recompute)
    ours, optimizer = moved(frozen(ours), inner, residency, MEMORY[residency == "device"], nvme=tmp_path)
    assert unfrozen_in_turns(ours, optimizer, None) == wanted
    assert_equal(ours, model)
    if residency == "device":
        assert all(chunk.place is StepPlace.DEVICE for chunk in optimizer._engine.chunks)


def head_first(model):
    model.requires_grad_(False)
    model.embed.requires_grad_(True)
    return adamw([model.embed.weight])


def add_in_turns(model, optimizer):
    found = train(model, optimizer, 3)
    for layers, options in ((model.layers[3:], {"lr": 3e-3}), (model.layers[:3], {"weight_decay": 0.0})):
        layers.requires_grad_(True)
        params = [p for layer in layers for p in layer.parameters()]
        optimizer.add_param_group({"params": params, **options})
        found += train(model, optimizer, 3)
    return found


@pytest.mark.parametrize("residency", PLACES, ids=str)
def test_groups_are_added(residency, tmp_path):
    model, _ = build(optimizer=lambda groups: None)
    wanted = add_in_turns(model, head_first(model))
    ours, _ = build(optimizer=lambda groups: None)
    ours, optimizer = moved(ours, head_first(ours), residency, MEMORY[residency == "device"], nvme=tmp_path)
    assert add_in_turns(ours, optimizer) == wanted
    assert_equal(ours, model)


def test_a_chunk_of_which_the_optimizer_has_a_part(tmp_path):
    """Gradients of the other part are neither stepped nor dropped with it."""

    def loop(model, optimizer):
        second = torch.optim.SGD([p for n, p in model.named_parameters() if "norm" in n], lr=0.1)
        found = []
        for step in range(4):
            found += train(model, optimizer, 1, micro=1)
            if step % 2:
                second.step()
                second.zero_grad()
        return found

    def some(model):
        model.requires_grad_(True)
        return adamw([p for n, p in model.named_parameters() if "norm" not in n])

    model, _ = build(optimizer=lambda groups: None)
    wanted = loop(model, some(model))
    for residency in PLACES:
        ours, _ = build(optimizer=lambda groups: None)
        memory, folder = MEMORY[residency == "device"], tmp_path / str(PLACES.index(residency))
        folder.mkdir()
        moved_model, optimizer = moved(ours, some(ours), residency, memory, nvme=folder)
        assert loop(moved_model, optimizer) == wanted
        assert_equal(moved_model, model)


def test_strange_groups():
    model, inner = build()
    _, optimizer = moved(model, inner, "host")
    with pytest.raises(PlanError, match="does not have"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    model, inner = build(optimizer=lambda groups: adamw(groups[0]["params"]))
    model, optimizer = moved(model, inner, "host")
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    with pytest.raises(PlanError, match="how all parameters are stepped"):
        optimizer.add_param_group({"params": norms, "amsgrad": True})
    optimizer.add_param_group({"params": norms})
    train(model, optimizer, 1, clip=torchs_clip)
