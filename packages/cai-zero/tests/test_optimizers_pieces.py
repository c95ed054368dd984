"""Parts of parameters: every element once, the same parameters on every rank, in the same order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import toy
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh import ParallelMesh
from cai_mesh.errors import MeshError
from cai_mesh.gradients import flat_of
from cai_mesh.layout import Layout, Shard, Slice, attach
from cai_mesh.testing import run_ranks
from cai_zero.optimizers import Lamb
from cai_zero.optimizers.pieces import parts_of
from cai_zero.optimizers.sums import resolve, square_sums, summed


def enumerated(stage, shape):
    """Every part of every tensor the optimizer meets, with the values this rank holds by global position."""
    built = toy.built(
        lambda model, mesh: Lamb(model.parameters()), stage, shape
    )  # parameters need their model
    found = []
    for group in built[1].param_groups:
        for param in group["params"]:
            for part in parts_of(param):
                boxes = part.boxes(part.segment(flat_of(param)))
                found.append((part.shape, sorted(part.axes), [(b, v.clone()) for b, v in boxes]))
    return found


@pytest.mark.parametrize(
    ("stage", "shape"), [(0, (2,)), (1, (2,)), (2, (3,)), (3, (3,)), (None, (1, 2)), (1, (2, 2)), (3, (2, 2))]
)
def test_every_element_once_and_the_same_parameters_everywhere(stage, shape):
    found = run_ranks(toy.ranks(shape), enumerated, stage, shape)
    known = [(s, axes) for s, axes, _ in found[0]]
    assert all([(s, axes) for s, axes, _ in held] == known for held in found)
    expected = {s: toy.initial(n) for n, (s, _) in toy.SHAPES.items()}
    assert sorted(s for s, _ in known) == sorted(expected)
    inside = 0
    for i, (global_shape, axes) in enumerate(known):
        full = torch.full(global_shape, float("nan"), dtype=torch.float64)
        count = torch.zeros(global_shape)
        for held in found:
            for box, values in held[i][2]:
                full[box.slices()] = values
                count[box.slices()] += 1
            inside += len(held[i][2]) > 1
        assert torch.equal(full, expected[global_shape])
        degree = 1
        for axis in axes:
            degree *= shape[("dp_shard", "tp").index(axis)]
        assert (count == toy.ranks(shape) / degree).all()
    assert inside or stage in (0, None), "no rank holds part of a row: the shapes test nothing"


def test_flat_ranges_without_spans():
    param = torch.nn.Parameter(torch.arange(5.0))
    layout = Layout((4, 3)).then("tp", 2, 1, Shard(0))
    attach(param, slices=(Slice(None, layout, (1, 6), 0, layout.sharded_axes),))
    (part,) = parts_of(param)
    assert (part.shape, part.axes, part.numel) == ((4, 3), {"tp"}, 12)
    assert [(b.offset, b.shape) for b, _ in part.boxes(part.segment(param.detach()))] == [
        ((2, 1), (1, 2)),
        ((3, 0), (1, 3)),
    ]


def sums():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    rank = dist.get_rank()
    mesh = ParallelMesh.of(mesh)
    axes = [resolve(frozenset(a), mesh) for a in ((), ("dp_shard",), ("tp",), ("tp", "dp_shard"), ("tp",))]
    given = [torch.full((i + 1,), 10.0**i * (rank + 1)) for i in range(5)]
    calls = []
    kept = dist.all_reduce

    def counted(*args, **kwargs):
        calls.append(1)
        return kept(*args, **kwargs)

    dist.all_reduce = counted
    try:
        found = summed(given, axes, mesh)
    finally:
        dist.all_reduce = kept
    assert len(calls) == 2, "one an axis, for all values together"
    assert all(torch.equal(g, torch.full((i + 1,), 10.0**i * (rank + 1))) for i, g in enumerate(given))
    return [float(f[0]) / 10**i for i, f in enumerate(found)]


def test_each_value_is_summed_over_its_own_axes():
    for rank, found in enumerate(run_ranks(4, sums)):
        row, column = rank // 2, rank % 2
        own, data, tensor = rank + 1, column + 1 + column + 3, 2 * row + 1 + 2 * row + 2
        assert found == pytest.approx([own, data, tensor, 10, tensor])


def test_sums_of_squares_where_nothing_is_held():
    empty, three = torch.zeros(0), torch.tensor([1.0, 2.0])
    assert square_sums([empty, empty], torch.float64).tolist() == [0.0, 0.0]
    assert square_sums([empty, three, empty], torch.float32).tolist() == pytest.approx([0.0, 5.0, 0.0])


def test_axes_no_mesh_has():
    assert resolve(frozenset(), None) == ()
    with pytest.raises(MeshError, match="knows no mesh") as caught:
        resolve(frozenset({"tp"}), None)
    assert "'tp'" in str(caught.value)
