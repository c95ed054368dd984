"""Boxes of local tensors, flat parts and DTensors, and the full tensor from every rank's."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt

from cai_mesh.layout import Box, BoxedTensor, Layout, ReduceSpec, Shard, Slice, attach
from cai_mesh.testing import run_ranks


def test_a_plain_tensor_is_one_box_and_a_view():
    tensor = torch.zeros(2, 3)
    boxed = BoxedTensor.from_param(tensor)
    ((box, view),) = boxed.pieces
    assert box == Box((0, 0), (2, 3))
    view.fill_(7)
    assert tensor.eq(7).all()
    assert boxed.owner
    scalar = BoxedTensor.from_param(torch.tensor(3.0))
    assert scalar.pieces[0][0] == Box((), ())
    assert scalar.to_full() == 3.0


def test_a_flat_part_and_what_is_laid_out_like_it():
    layout = Layout((4, 3)).then("tp", 2, 0, Shard(0))
    param = torch.nn.Parameter(torch.arange(4.0))
    attach(param, slices=(Slice(None, layout, (1, 5), 0, frozenset()),))
    moment = torch.arange(10.0, 14.0)
    full = BoxedTensor.like(param, moment).to_full()
    assert full.shape == (4, 3)
    assert full.flatten()[1:5].tolist() == [10, 11, 12, 13]
    assert full.isnan().sum() == 8
    full = BoxedTensor.from_param(torch.zeros(3, dtype=torch.int64))
    assert BoxedTensor(full.global_shape, full.dtype, ()).to_full().tolist() == [0, 0, 0]


def test_a_tied_copy_does_not_own():
    param = torch.nn.Parameter(torch.zeros(3))
    attach(param, reduce=ReduceSpec(owner=False))
    assert not BoxedTensor.from_param(param).owner
    attach(param, slices=(Slice(None, Layout((3,)), (0, 3), 0, frozenset(), owner=False),))

    assert not BoxedTensor.from_param(param).owner


def from_ranks():
    rank = dist.get_rank()
    full = torch.arange(28.0).view(7, 4)
    layout = Layout((7, 4)).then("x", 3, rank, Shard(0)).then("x", 1, 0, Shard(1))
    local = full[[i for s, n in layout.segments(0) for i in range(s, s + n)]].clone()
    attach(local, layout)
    assert torch.equal(BoxedTensor.from_param(local).to_full(dist.group.WORLD), full)
    mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("x",))
    tensor = dt.distribute_tensor(full, mesh, [dt.Shard(0)])
    assert torch.equal(BoxedTensor.from_param(tensor).to_full(dist.group.WORLD), full)
    moment = torch.zeros_like(tensor)
    moment.to_local().add_(1)
    assert BoxedTensor.like(tensor, moment).to_full(dist.group.WORLD).eq(1).all()


def test_the_full_tensor_from_every_rank():
    run_ranks(3, from_ranks)
