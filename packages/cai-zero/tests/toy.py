"""A model of odd parameters with known gradients, full or divided every way, for comparing optimizers.

The gradient of every parameter p is `noise(name, step, data rank) + p / 2`, so a twin needs no forward, and
tensor-parallel parameters need no parallel modules: their layouts are attached by hand.
"""

from __future__ import annotations

import zlib

import torch
from over_ranks import full_parameters
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh.layout import Layout, Shard, attach
from cai_zero import shard_module, shard_optimizer

STEPS = 12

SHAPES = {
    "embed": ((37, 11), Shard(0)),
    "layers.0.up": ((31, 13), Shard(0)),
    "layers.0.down": ((13, 23), Shard(1)),
    "layers.0.small": ((7, 5), Shard(1)),
    "layers.0.bias": ((31,), Shard(0)),
    "layers.0.norm": ((5,), None),
    "layers.1.packed": ((24, 13), Shard(0, (16, 8))),
    "layers.1.conv": ((6, 5, 7), Shard(1)),
    "layers.1.scale": ((), None),
    "layers.1.unused": ((6, 4), Shard(1)),
}
"""Large enough beside the alignment of chunks that ranks divide most matrices inside a row."""


def initial(name, dtype=torch.float64):
    shape, _ = SHAPES[name]
    return 0.3 * torch.randn(shape, generator=generator(name), dtype=torch.float64).to(dtype)


def generator(*parts):
    return torch.Generator().manual_seed(zlib.crc32(repr(parts).encode()))


def noise(name, step, rank):
    """The part of a gradient that does not depend on the parameter; 6 data ranks in all."""
    return torch.randn(SHAPES[name][0], generator=generator(name, step, rank), dtype=torch.float64)


def mean_noise(name, step):
    return torch.stack([noise(name, step, rank) for rank in range(6)]).mean(0)


class Block(nn.Module):
    def forward(self, values):
        return sum(
            (p * values[n]).sum() + (p * p).sum() / 4
            for n, p in self.named_parameters(recurse=False)
            if n in values
        )


class Toy(Block):
    """The parameters of `SHAPES`, this rank's part of each."""

    def __init__(self, tp=1, index=0, dtype=torch.float64):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.layouts = {}
        for name, (shape, placement) in SHAPES.items():
            layout = Layout(shape)
            if tp > 1 and placement is not None:
                layout = layout.then("tp", tp, index, placement)
            self.layouts[name] = layout
            param = nn.Parameter(cut(initial(name, dtype), layout))
            if layout.steps:
                attach(param, layout)
            *path, leaf = name.split(".")
            self.get_submodule(".".join(path)).register_parameter(leaf, param)

    def forward(self, values):
        local = {n: cut(v, self.layouts[n]) for n, v in values.items()}
        total = super().forward(local)
        for i, layer in enumerate(self.layers):
            total = total + layer(
                {n.rsplit(".", 1)[1]: v for n, v in local.items() if n.startswith(f"layers.{i}.")}
            )
        return total


def cut(full, layout):
    """This rank's local tensor of a full one."""
    local = torch.empty(layout.local_shape, dtype=full.dtype)
    for index, box in layout.slices():
        local[index] = full[box.slices()]
    return local


def groups_of(model, special=("embed",), **options):
    """Two param groups: `special` names with options, and the rest."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if n not in special]},
        {"params": [p for n, p in named.items() if n in special], **options},
    ]


def values(step, rank, world, dtype):
    """What a data rank puts in: the mean of its share of the noises."""
    share = range(rank * 6 // world, (rank + 1) * 6 // world)
    names = [n for n in SHAPES if "unused" not in n]
    return {n: torch.stack([noise(n, step, r) for r in share]).mean(0).to(dtype) for n in names}


def built(make, stage, shape, dtype=torch.float64, **zero):
    """(model, optimizer, mesh) of `make(param groups, mesh)` on a mesh (data,) or (data, tp); stage None: no ZeRO."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp")[: len(shape)])
    tp = shape[1] if len(shape) > 1 else 1
    model = Toy(tp, mesh.get_local_rank("tp") if tp > 1 else 0, dtype)
    if stage == 3:
        shard_module(model, mesh, **zero)
    optimizer = make(model, mesh)
    if stage in (0, 1, 2):
        optimizer = shard_optimizer(optimizer, mesh, model=model, stage=stage, **zero)
    return model, optimizer, mesh


def advance(model, optimizer, mesh, steps, dtype=torch.float64):
    world = mesh.size(0) if mesh is not None else 1
    rank = mesh.get_local_rank("dp_shard") if mesh is not None and world > 1 else 0
    for step in steps:
        model(values(step, rank, world, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(make, stages, shape):
    """Final parameters by stage."""
    found = {}
    for stage in stages:
        model, optimizer, mesh = built(make, stage, shape)
        advance(model, optimizer, mesh, range(STEPS))
        found[stage] = full_parameters(model)
    return found


def one_process(make):
    """The same optimizer on full tensors."""
    model = Toy()
    advance(model, make(model, None), None, range(STEPS))
    return full_parameters(model)


def twin(update, steps=STEPS):
    """Parameters after `update(name, parameter, gradient, state, step)` on full tensors, step from 1."""
    params = {n: initial(n) for n in SHAPES}
    states = {n: {} for n in SHAPES}
    for step in range(steps):
        for name, p in params.items():
            if "unused" in name:
                continue
            grad = mean_noise(name, step) + p / 2
            params[name] = update(name, p, grad, states[name], step + 1)
    return params


def compare(got, expected, tolerance=1e-9):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = float((got[name].double() - value.double()).abs().max()) / max(float(value.abs().max()), 1e-3)
        assert error <= tolerance, f"{name}: {error:.2e}"


def torch_twin(make, steps=STEPS):
    """Parameters after one of torch's own optimizers, `make(name to parameter)`, on full tensors."""
    params = {n: nn.Parameter(initial(n)) for n in SHAPES}
    optimizers = make(params)
    for step in range(steps):
        for name, p in params.items():
            p.grad = None if "unused" in name else mean_noise(name, step) + p.detach() / 2
        for optimizer in optimizers:
            optimizer.step()
    return {n: p.detach() for n, p in params.items()}


LAYOUTS = [((2,), (0, 1, 2, 3)), ((3,), (1, 3)), ((1, 2), (None,)), ((2, 2), (1, 2, 3))]
"""(mesh (data,) or (data, tp), stages)."""


def ranks(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)
