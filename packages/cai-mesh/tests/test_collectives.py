"""Eager and differentiable collectives against their meaning on one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cai_mesh import autograd, collectives
from cai_mesh.errors import LayoutError
from cai_mesh.testing import run_ranks


def eager(dtype):
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    ranks = torch.arange(world).to(dtype)
    for async_op in (False, True):
        for op, value in (
            ("sum", ranks.sum()),
            ("max", world - 1),
            ("min", 0),
            ("avg", ranks.float().mean()),
        ):
            x = torch.full((3,), float(rank), dtype=dtype)
            collectives.all_reduce(x, group, op=op, async_op=async_op).wait()
            torch.testing.assert_close(x, torch.full((3,), float(value), dtype=dtype))
        out = torch.zeros(2 * world, dtype=dtype)
        part = out[2 * rank : 2 * rank + 2].fill_(rank)
        handle = collectives.all_gather_into(out, part, group, async_op=async_op)
        handle.wait()
        assert torch.equal(out, ranks.repeat_interleave(2))
        shard, full = torch.zeros(2, dtype=dtype), torch.arange(2 * world).to(dtype) + rank
        collectives.reduce_scatter_into(shard, full, group, async_op=async_op).wait()
        expected = sum(torch.arange(2 * world).to(dtype) + r for r in range(world))
        assert torch.equal(shard, expected[2 * rank : 2 * rank + 2])
        got = torch.zeros(world, dtype=dtype)
        collectives.all_to_all(
            got, torch.full((world,), float(rank), dtype=dtype), group, async_op=async_op
        ).wait()
        assert torch.equal(got, ranks)
        x = torch.full((2,), float(rank), dtype=dtype)
        collectives.broadcast(x, world - 1, group, async_op=async_op).wait()
        assert (x == world - 1).all()
    assert collectives.all_gather_object({"rank": rank}, group) == [{"rank": r} for r in range(world)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_eager_collectives(dtype):
    run_ranks(3, eager, dtype)


def test_a_world_of_one():
    x, out = torch.arange(3.0), torch.zeros(3)
    collectives.all_reduce(x, None).wait()
    collectives.all_gather_into(out, x, None).wait()
    assert torch.equal(out, torch.arange(3.0))
    collectives.reduce_scatter_into(out, x + 1, None).wait()
    assert torch.equal(out, torch.arange(3.0) + 1)
    assert collectives.all_gather_object(1, None) == [1]
    for pair in (autograd.copy_to, autograd.reduce_from, autograd.all_to_all):
        assert pair(x, None) is x
    for pair in (autograd.gather_from, autograd.scatter_to, autograd.all_gather, autograd.reduce_scatter):
        assert pair(x, 0, None) is x


def both(fn, x, weight, compiled):
    x = x.clone().requires_grad_()
    out = (torch.compile(fn, fullgraph=True, backend="aot_eager") if compiled else fn)(x)
    (grad,) = torch.autograd.grad((out * weight).sum(), x)
    return out.detach(), grad


def pairs(compiled):
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    gen = torch.Generator().manual_seed(0)
    xs = torch.randn(world, 6, 6, generator=gen, dtype=torch.float64)
    x, total = xs[rank], xs.sum(0)
    for dim in (0, 1):
        joined = torch.cat(list(xs), dim)
        wide = torch.randn(world, *joined.shape, generator=gen, dtype=torch.float64)
        small = torch.randn(6, 6, generator=gen, dtype=torch.float64).chunk(world, dim)
        cases = [
            (lambda t: autograd.copy_to(t, group), xs[rank], x, total),
            (lambda t: autograd.reduce_from(t, group), x, total, x),
            (
                lambda t, d=dim: autograd.gather_from(t, d, group),
                wide[0],
                joined,
                wide[0].chunk(world, dim)[rank],
            ),
            (
                lambda t, d=dim: autograd.all_gather(t, d, group),
                wide[rank],
                joined,
                wide.sum(0).chunk(world, dim)[rank],
            ),
            (
                lambda t, d=dim: autograd.scatter_to(t, d, group),
                small[rank],
                x.chunk(world, dim)[rank],
                torch.cat(small, dim),
            ),
            (
                lambda t, d=dim: autograd.reduce_scatter(t, d, group),
                small[rank],
                total.chunk(world, dim)[rank],
                torch.cat(small, dim),
            ),
        ]
        for fn, weight, out, grad in cases:
            got, got_grad = both(fn, x, weight, compiled)
            torch.testing.assert_close(got, out)
            torch.testing.assert_close(got_grad, grad)
    got, grad = both(lambda t: autograd.all_to_all(t, group), x, xs[rank], compiled)
    swapped = torch.cat([other.chunk(world)[rank] for other in xs])
    torch.testing.assert_close(got, swapped)
    torch.testing.assert_close(grad, swapped)
    with pytest.raises(LayoutError, match="equal parts"):
        autograd.scatter_to(torch.zeros(5, 5), 0, group)


@pytest.mark.parametrize("world", [2, 3])
def test_pairs_mean_what_one_process_does(world):
    run_ranks(world, pairs, False)


def test_pairs_are_traced_whole():
    run_ranks(2, pairs, True, timeout=120)
