"""A full state dict leaves a sharded model, and enters another, without a bit changed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import Layout, Shard, attach
from cai_mesh.testing import RankError, run_ranks
from cai_zero import (
    MixedPrecision,
    full_state_dict,
    load_full_state_dict,
    shard_module,
    shard_optimizer,
)


class Net(nn.Module):
    """Matrices that ranks divide inside a row, tied weights, a frozen parameter, a scalar, a buffer that is
    saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(29, 23)
        self.layers = nn.ModuleList(nn.Linear(23, 23) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(23), requires_grad=False)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.head = nn.Linear(23, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x * self.scale * self.gain)


def build(seed: int = 0):
    torch.manual_seed(seed)
    return Net()


def mesh_of(shape):
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])


def sharded(stage, mesh, seed=0, precision=None):
    model = build(seed)
    if stage == 3:
        return shard_module(model, mesh, precision=precision), None
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return model, shard_optimizer(inner, mesh, model=model, stage=stage, precision=precision)


def gathered(stage, shape, rank, with_forward):
    model, _ = sharded(stage, mesh_of(shape))
    if with_forward:
        model(torch.arange(11))  # and no backward: stage 3 leaves some of it unsharded
    full = full_state_dict(model, rank=rank)
    model(torch.arange(11)).sum().backward()
    return full


@pytest.mark.parametrize(
    ("stage", "shape", "rank", "with_forward"),
    [
        (0, (2,), 0, False),
        (1, (2,), 1, True),
        (2, (3,), 2, False),
        (3, (2,), 1, True),
        (3, (3,), 0, False),
        (3, (2, 2), 3, True),
    ],
)
def test_every_name_and_bit_arrives_on_one_rank(stage, shape, rank, with_forward):
    expected = build().state_dict()
    world = shape[0] * shape[-1] if len(shape) > 1 else shape[0]
    for index, got in enumerate(run_ranks(world, gathered, stage, shape, rank, with_forward)):
        if index != rank:
            assert got == {}
            continue
        assert list(got) == list(expected)
        assert all(torch.equal(got[n], expected[n]) and got[n].dtype == expected[n].dtype for n in expected)
        assert got["head.weight"] is got["embed.weight"]


def selected():
    model, _ = sharded(3, mesh_of((2,)))
    return full_state_dict(model, only=lambda name: name.startswith("layers.1") or name == "head.weight")


def test_only_what_was_asked_for():
    expected = build().state_dict()
    got, other = run_ranks(2, selected)
    assert list(got) == ["layers.1.weight", "layers.1.bias", "head.weight"]
    assert other == {}
    assert all(torch.equal(got[n], expected[n]) for n in got)


def masters(stage):
    model, optimizer = sharded(stage, mesh_of((2,)), precision=MixedPrecision(compute=torch.bfloat16))
    weights = optimizer.weights() if optimizer is not None else None
    return full_state_dict(model, weights=weights), full_state_dict(
        model, weights=weights, dtype=torch.float16
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_float32_masters_are_not_rounded(stage):
    expected = {n: p for n, p in build().named_parameters() if p.requires_grad}
    exact, rounded = run_ranks(2, masters, stage)[0]
    assert all(torch.equal(exact[n], p) for n, p in expected.items())
    assert all(torch.equal(rounded[n], p.half()) for n, p in expected.items())
    assert rounded["count"].dtype == torch.int64


def loaded(stage, shape, rank, compute):
    precision = MixedPrecision(compute=compute)
    model, optimizer = sharded(stage, mesh_of(shape), seed=1, precision=precision)
    weights = optimizer.weights() if optimizer is not None else None
    state = build().state_dict() if dist.get_rank() == rank else {}
    state.pop("head.weight", None)  # one of two tied names is enough
    state |= {"count": torch.arange(3) + 7} if state else {}
    load_full_state_dict(model, state, weights=weights, rank=rank)
    if optimizer is not None:
        optimizer.publish()
    return full_state_dict(model, weights=weights), model(torch.arange(11)).float().detach()


@pytest.mark.parametrize(
    ("stage", "shape", "rank", "compute"),
    [
        (0, (2,), 0, None),
        (1, (2,), 1, torch.bfloat16),
        (2, (3,), 0, None),
        (3, (2,), 1, None),
        (3, (2, 2), 0, torch.bfloat16),
    ],
)
def test_what_was_saved_full_loads_on_any_stage(stage, shape, rank, compute):
    model = build()
    expected = model.state_dict() | {"count": torch.arange(3) + 7}
    if compute is not None:
        outputs = build().to(compute)(torch.arange(11)).float().detach()
        expected["scale"] = expected["scale"].to(compute) if stage < 3 else expected["scale"]
    else:
        outputs = model(torch.arange(11)).detach()
    world = shape[0] * shape[-1] if len(shape) > 1 else shape[0]
    results = run_ranks(world, loaded, stage, shape, rank, compute)
    assert all(torch.equal(results[0][0][n], value) for n, value in expected.items())
    assert all(torch.equal(got, outputs) for _, got in results)


def test_one_process():
    model = build()
    full = full_state_dict(model)
    assert list(full) == list(model.state_dict())
    other = build(1)
    load_full_state_dict(other, full)
    assert all(torch.equal(v, full[n]) for n, v in other.state_dict().items())
    full["embed.weight"].zero_()
    assert model.embed.weight.abs().sum() > 0, "a result that shares the model's memory changes with training"


def test_another_models_state_changes_nothing():
    model = build()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    wrong = build(1).state_dict() | {"layers.1.bias": torch.zeros(6)}
    del wrong["gain"]
    with pytest.raises(PlanError, match="2 of 10 tensors differ") as caught:
        load_full_state_dict(model, wrong)
    assert "gain: this model (), state nothing" in str(caught.value)
    assert "layers.1.bias: this model (23,), state (6,)" in str(caught.value)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def half():
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(model.weight[:2].detach())
    attach(model.weight, Layout((4, 4)).then("tp", 2, 0, Shard(0)))  # and no rank has the other half
    full_state_dict(model)


def test_a_part_that_no_rank_holds():
    with pytest.raises(RankError, match="no rank of the group holds all of 'weight'") as caught:
        run_ranks(2, half)
    assert str(caught.value).count("8 of 16 elements") == 2, "one rank alone raised"


def bounded():
    """Bytes that passed through this rank at once, at most."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    shard_module(model, mesh_of((2,)))
    largest, send, recv = 0, dist.send, dist.recv

    def watched(call):
        def through(tensor, **kwargs):
            nonlocal largest
            largest = max(largest, tensor.numel())
            return call(tensor, **kwargs)

        return through

    dist.send, dist.recv = watched(send), watched(recv)
    try:
        full_state_dict(model)
    finally:
        dist.send, dist.recv = send, recv
    return largest


def test_no_more_than_a_part_of_one_tensor_is_under_way():
    assert max(run_ranks(2, bounded)) <= 64 * 64
