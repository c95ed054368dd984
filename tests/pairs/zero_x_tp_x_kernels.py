"""FP8 linear layers, cut over tensor-parallel ranks, under every ZeRO stage, with float32 gradients in chunks.

Each rank scales its own part of a weight and of the batch, so cut layers round in another way than whole ones. The twin
is one process with the parts as layers of their own and the ranks' samples one after the other: the same casts.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from cai_kernels import Fp8Linear, convert_to_fp8
from cai_kernels.errors import KernelError
from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_mesh.gradients import raw_grad
from cai_mesh.layout import layout_of
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import Plan, parallelize
from cai_zero import MixedPrecision, full_state_dict, shard_module, shard_optimizer

WIDTH, HIDDEN, STEPS, TP = 32, 64, 4, 2
PLAN = Plan({"layers.*.up": "colwise", "layers.*.gate": "colwise", "layers.*.down": "rowwise"})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class InParts(Block):
    """What the ranks compute, in one process: each part of a layer is a layer, and partial results are added."""

    def forward(self, x):
        y = self.norm(x)
        cut = self.gate.weight.shape[0] // TP
        partial = 0
        for i in range(TP):
            mine = slice(i * cut, (i + 1) * cut)
            gate = self.run(y, self.gate.weight[mine], None)
            up = self.run(y, self.up.weight[mine], self.up.bias[mine])
            partial = partial + self.run(F.silu(gate) * up, self.down.weight[:, mine], None)
        return x + partial + self.down.bias

    def run(self, x, weight, bias):
        from cai_kernels import fp8_linear

        return fp8_linear(x, weight.contiguous(), bias, scaling="row")


def build(block=Block):
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        layer.__class__ = block
    return model


def batch(step):
    """Samples of four tokens."""
    gen = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, WIDTH, generator=gen), torch.randn(4, 4, 8, generator=gen)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def reference():
    model = build(InParts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        halves = zip(*(part.chunk(2) for part in batch(step)), strict=True)
        loss = [loss_of(model, *half) for half in halves]
        for each in loss:
            (each / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(loss).detach()) / 2)
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def train(stage, compiled):
    mesh = init_device_mesh("cpu", (2, TP), mesh_dim_names=("dp_shard", "tp"))
    model = build()
    assert len(convert_to_fp8(model, scaling="row", skip=lambda name, _: name == "head")) == 6
    parallelize(model, mesh, PLAN)
    assert all(
        type(layer.up) is Fp8Linear and layer.up.weight.shape == (HIDDEN // TP, WIDTH)
        for layer in model.layers
    )
    assert "forward" not in model.layers[0].up.__dict__
    if stage == 3:
        shard_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage < 3:
        optimizer = shard_optimizer(optimizer, mesh, model=model, stage=stage)
    for layer in model.layers:
        if compiled:
            layer.forward = torch.compile(layer.forward, fullgraph=True)
    rank = mesh["dp_shard"].get_local_rank()
    losses, norms = [], []
    for step in range(STEPS):
        x, y = (t.chunk(2)[rank] for t in batch(step))
        loss = loss_of(model, x, y)
        loss.backward()
        if stage < 3:
            assert all(raw_grad(p) is None for p in model.parameters())
        norm = (
            clip_grad_norm_(model.parameters(), 0.5, mesh) if stage == 3 else optimizer.clip_grad_norm_(0.5)
        )
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean, group=mesh["dp_shard"].get_group())
        losses.append(float(mean) / 2)
        norms.append(float(norm))
    return losses, norms, full_state_dict(model)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equals_parts_in_one_process(stage, compiled):
    losses, norms, final = reference()
    got = run_ranks(4, train, stage, compiled, timeout=200)
    assert got[0][0] == pytest.approx(losses, rel=1e-4)
    assert got[0][1] == pytest.approx(norms, rel=1e-3)
    for name, value in final.items():
        error = (got[0][2][name] - value).norm() / value.norm()
        assert error < 5e-3, (name, float(error))


def gradients(dtype):
    """Float32 gradients of bfloat16 weights, two microbatches, on parts that give the twin's bits."""
    mesh = init_device_mesh("cpu", (1, TP), mesh_dim_names=("dp_shard", "tp"))
    model = build()
    convert_to_fp8(model, scaling="row", skip=lambda name, _: name == "head")
    parallelize(model, mesh, PLAN)
    precision = MixedPrecision(compute=dtype)
    optimizer = shard_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), mesh, model=model, precision=precision
    )
    for step in range(2):
        x, y = batch(step)
        with optimizer.defer():
            loss_of(model, x.to(dtype), y.to(dtype)).float().backward()
    found = optimizer.gradients()
    return {n: (layout_of(p), found[n].to_full(mesh["tp"].get_group())) for n, p in model.named_parameters()}


def sums_of_gradients(dtype):
    """The twin's gradients of two microbatches at weights and inputs rounded to bfloat16, added in float32."""
    twin = build(InParts).bfloat16().to(dtype)
    total = {}
    for step in range(2):
        x, y = (t.bfloat16().to(dtype) for t in batch(step))
        twin.zero_grad()
        loss_of(twin, x, y).float().backward()
        for name, p in twin.named_parameters():
            total[name] = total.get(name, 0) + p.grad.float()
    return total


def test_float32_gradients_of_bfloat16_layers():
    """As near to the gradients of float32 activations as one process in bfloat16 comes."""
    exact, rounded = sums_of_gradients(torch.float32), sums_of_gradients(torch.bfloat16)
    for name, (_, got) in run_ranks(TP, gradients, torch.bfloat16)[0].items():
        assert got.dtype == torch.float32
        error, usual = ((each - exact[name]).norm() / exact[name].norm() for each in (got, rounded[name]))
        assert error < 2 * usual, (name, float(error), float(usual))


def too_narrow():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(32, 32))
    convert_to_fp8(model)
    weight = model[0].weight
    with pytest.raises(KernelError, match="FP8 products cannot take") as caught:
        parallelize(model, mesh, Plan({"0": "colwise"}))
    assert "(8, 32)" in str(caught.value) and model[0].weight is weight
    assert BoxedTensor.from_param(weight).global_shape == (32, 32)


def test_parts_that_fp8_cannot_multiply_are_refused():
    run_ranks(4, too_narrow)
