"""The norm of any mix of layouts is that of one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import nn

from cai_mesh.comm import coordinate
from cai_mesh.errors import CaiError, MeshError
from cai_mesh.gradients import clip_grad_norm_, grad_norm
from cai_mesh.layout import FlatChunk, Layout, ReduceSpec, Shard, Slice, attach
from cai_mesh.testing import run_ranks

NAMES = ("tp", "replicated", "chunked_a", "chunked_b", "stage0", "stage1", "tied")
SHAPES = {"chunked_a": (9, 5), "chunked_b": (33,), "tp": (7, 4)}


def gradient(name, dtype=torch.float64):
    generator = torch.Generator().manual_seed(NAMES.index(name))
    return (torch.randn(SHAPES.get(name, (6, 3)), generator=generator, dtype=torch.float64) * 3).to(dtype)


def with_grad(grad):
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad.clone()
    return param


def tensor_parallel(where, degree, name="tp"):
    full = gradient(name)
    layout = Layout(full.shape).then("tp", degree, where, Shard(0))
    param = with_grad(torch.cat([full[index] for index in (box.slices() for _, box in layout.slices())]))
    attach(param, layout)
    return param


def flat_shard(where, degree):
    """A shard of a chunk of two parameters, one of them cut over tp as well (the same part on all: index 0 of 1)."""
    full = [gradient("chunked_a"), gradient("chunked_b")]
    chunk = FlatChunk([("a", full[0]), ("b", full[1])], world=degree)
    buffer = chunk.allocate(torch.float64, "cpu")
    chunk.fill(buffer, full)
    low, high = chunk.shard_range(where)
    param = with_grad(buffer[low:high])
    axes = frozenset({"dp_shard"})
    parts = chunk.overlaps(low, high)
    attach(
        param, slices=tuple(Slice(p.slot.name, p.slot.layout, (p.low, p.high), p.start, axes) for p in parts)
    )
    return param


def mine(where, shape):
    """This rank's parameters; those of stage 1 include a copy of what stage 0 owns."""
    params = [
        with_grad(gradient("replicated")),
        tensor_parallel(where["tp"], shape["tp"]),
        flat_shard(where["dp_shard"], shape["dp_shard"]),
    ]
    if shape["pp"] == 1:
        params += [with_grad(gradient(n)) for n in ("stage0", "stage1", "tied")]
        return params
    # what every stage holds is counted once a stage; leave the common ones to stage 0
    stage = where["pp"]
    tied = with_grad(gradient("tied"))
    attach(tied, reduce=ReduceSpec(owner=stage == 0))
    return (params if stage == 0 else []) + [with_grad(gradient(f"stage{stage}")), tied]


def layouts(shape, max_norm):
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    sizes = dict(zip(names, shape, strict=True))
    found = []
    for norm_type in (2.0, math.inf):
        params = mine(coordinate(mesh), sizes)
        frozen = nn.Parameter(torch.zeros(3))
        norm = clip_grad_norm_([*params, frozen], max_norm, mesh, norm_type=norm_type)
        assert frozen.grad is None
        again = grad_norm(params, mesh, norm_type)
        found.append((float(norm), float(again), params[0].grad[0, 0].item()))
    return found, coordinate(mesh)["pp"]


def reference(max_norm, norm_type):
    params = [with_grad(gradient(n)) for n in NAMES]
    norm = nn.utils.clip_grad_norm_(params, max_norm, norm_type=norm_type)
    again = nn.utils.get_total_norm([p.grad for p in params], norm_type)
    grads = dict(zip(NAMES, params, strict=True))
    return float(norm), float(again), grads


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1), (1, 1, 2, 2), (2, 1, 2, 1), (2, 1, 1, 2)],
)
@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_equals_torch_on_one_process(shape, max_norm):
    expected = [reference(max_norm, norm_type) for norm_type in (2.0, math.inf)]
    for found, stage in run_ranks(math.prod(shape), layouts, shape, max_norm):
        for (norm, again, first), (want, want_again, grads) in zip(found, expected, strict=True):
            assert norm == pytest.approx(want, rel=1e-12)
            assert again == pytest.approx(want_again, rel=1e-12)
            shown = "replicated" if stage == 0 else "stage1"
            assert first == pytest.approx(float(grads[shown].grad[0, 0]), rel=1e-12)


def one_without_a_number():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = []
    for where in range(dist.get_world_size()):
        layout = Layout((dist.get_world_size(),)).then("tp", dist.get_world_size(), dist.get_rank(), Shard(0))
        param = with_grad(torch.tensor([math.nan if dist.get_rank() == where else 3.0]))
        attach(param, layout)
        found += [float(grad_norm([param], mesh, kind)) for kind in (math.inf, 2.0)]
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_nan_on_any_rank_is_the_norm_on_all(world):
    for found in run_ranks(world, one_without_a_number):
        assert all(map(math.isnan, found))


def odd_ranks():
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    held = [with_grad(torch.tensor([3.0, 4.0], dtype=torch.float64))] if rank == 0 else []
    assert clip_grad_norm_(held, 1.0, mesh) == pytest.approx(5.0)
    assert grad_norm(held, mesh, math.inf) == pytest.approx(0.8, rel=1e-6)
    # one row over two ranks: the second holds nothing of it
    tp = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layout = Layout((1, 2)).then("tp", 2, rank, Shard(0))
    param = with_grad(torch.tensor([[3.0, -4.0]])[: 1 - rank])
    attach(param, layout)
    assert grad_norm([param], tp) == 5.0
    assert grad_norm([param], tp, math.inf) == 4.0
    # bfloat16 is summed in float32
    half = with_grad(torch.full((4096,), 0.01, dtype=torch.bfloat16))
    assert grad_norm([half], tp) == pytest.approx(float(half.grad.double().norm()), rel=1e-6)
    with pytest.raises(MeshError, match="lacks"):
        grad_norm([param], mesh)


def test_a_rank_without_gradients_or_with_empty_ones():
    run_ranks(2, odd_ranks)


def dtensors():
    full = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    norms = []
    for names in (None, ("data",)):
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=names)
        params = []
        for placement in (dt.Shard(0), dt.Replicate()):
            param = nn.Parameter(dt.distribute_tensor(torch.zeros(7, 4), mesh, [placement]))
            param.grad = dt.distribute_tensor(full.clone(), mesh, [placement])
            params.append(param)
        norms.append(float(clip_grad_norm_(params, 1.0, mesh)))
        for param in params:
            torch.testing.assert_close(param.grad.full_tensor(), full / norms[-1], rtol=1e-5, atol=1e-6)
    return norms


def test_dtensor_gradients_count_once():
    full = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    for norms in run_ranks(2, dtensors):
        assert norms == pytest.approx([float(full.norm() * math.sqrt(2))] * 2, rel=1e-6)


def test_one_process_and_bad_arguments():
    param = with_grad(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(param, 10.0) == 5.0
    assert param.grad.tolist() == [3.0, 4.0]
    assert clip_grad_norm_([], 1.0) == 0.0
    with pytest.raises(CaiError, match="unknown norm"):
        clip_grad_norm_(param, 1.0, norm_type=1.0)
    param.grad[0] = float("nan")
    with pytest.raises(CaiError, match="not finite"):
        clip_grad_norm_(param, 1.0, error_if_nonfinite=True)
    assert param.grad[1] == 4.0, "gradients were scaled before the error"
