"""Eager and differentiable collectives against their meaning on one process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from cai_mesh import comm
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
            comm.all_reduce(x, group, op=op, async_op=async_op).wait()
            torch.testing.assert_close(x, torch.full((3,), float(value), dtype=dtype))
        out = torch.zeros(2 * world, dtype=dtype)
        part = out[2 * rank : 2 * rank + 2].fill_(rank)
        handle = comm.all_gather_into(out, part, group, async_op=async_op)
        handle.wait()
        assert torch.equal(out, ranks.repeat_interleave(2))
        shard, full = torch.zeros(2, dtype=dtype), torch.arange(2 * world).to(dtype) + rank
        comm.reduce_scatter_into(shard, full, group, async_op=async_op).wait()
        expected = sum(torch.arange(2 * world).to(dtype) + r for r in range(world))
        assert torch.equal(shard, expected[2 * rank : 2 * rank + 2])
        got = torch.zeros(world, dtype=dtype)
        comm.all_to_all_into(
            got, torch.full((world,), float(rank), dtype=dtype), group, async_op=async_op
        ).wait()
        assert torch.equal(got, ranks)
        x = torch.full((2,), float(rank), dtype=dtype)
        comm.broadcast(x, world - 1, group, async_op=async_op).wait()
        assert (x == world - 1).all()
    assert comm.all_gather_object({"rank": rank}, group) == [{"rank": r} for r in range(world)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_eager_collectives(dtype):
    run_ranks(3, eager, dtype)


def test_a_world_of_one():
    x, out = torch.arange(3.0), torch.zeros(3)
    comm.all_reduce(x, None).wait()
    comm.all_gather_into(out, x, None).wait()
    assert torch.equal(out, torch.arange(3.0))
    comm.reduce_scatter_into(out, x + 1, None).wait()
    assert torch.equal(out, torch.arange(3.0) + 1)
    assert comm.all_gather_object(1, None) == [1]
    for pair in (comm.copy_to, comm.reduce_from, comm.all_to_all):
        assert pair(x, None) is x
    for pair in (comm.gather_from, comm.scatter_to, comm.all_gather, comm.reduce_scatter):
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
            (lambda t: comm.copy_to(t, group), xs[rank], x, total),
            (lambda t: comm.reduce_from(t, group), x, total, x),
            (
                lambda t, d=dim: comm.gather_from(t, d, group),
                wide[0],
                joined,
                wide[0].chunk(world, dim)[rank],
            ),
            (
                lambda t, d=dim: comm.all_gather(t, d, group),
                wide[rank],
                joined,
                wide.sum(0).chunk(world, dim)[rank],
            ),
            (
                lambda t, d=dim: comm.scatter_to(t, d, group),
                small[rank],
                x.chunk(world, dim)[rank],
                torch.cat(small, dim),
            ),
            (
                lambda t, d=dim: comm.reduce_scatter(t, d, group),
                small[rank],
                total.chunk(world, dim)[rank],
                torch.cat(small, dim),
            ),
        ]
        for fn, weight, out, grad in cases:
            got, got_grad = both(fn, x, weight, compiled)
            torch.testing.assert_close(got, out)
            torch.testing.assert_close(got_grad, grad)
    for steps in (1, -1, 2, world):
        got, grad = both(lambda t, s=steps: comm.shift(t, group, s), x, xs[rank], compiled)
        torch.testing.assert_close(got, xs[(rank - steps) % world])
        torch.testing.assert_close(grad, xs[(rank + steps) % world])
    for gathered, scattered in ((0, 1), (1, 0), (-1, -2)):
        mine = torch.cat(list(xs), gathered).chunk(world, scattered)[rank]
        got, grad = both(
            lambda t, a=gathered, b=scattered: comm.swap_shards(t, a, b, group), x, mine, compiled
        )
        torch.testing.assert_close(got, mine)
        torch.testing.assert_close(grad, x)  # what was swapped goes back
    got, grad = both(lambda t: comm.all_to_all(t, group), x, xs[rank], compiled)
    swapped = torch.cat([other.chunk(world)[rank] for other in xs])
    torch.testing.assert_close(got, swapped)
    torch.testing.assert_close(grad, swapped)
    for refused in (comm.scatter_to, lambda t, d, g: comm.swap_shards(t, 1, d, g)):
        with pytest.raises(LayoutError, match="equal parts"):
            refused(torch.zeros(5, 5), 0, group)
    with pytest.raises(LayoutError, match="two dims"):
        comm.swap_shards(x, 1, -1, group)


def messages():
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    after, before = (rank + 1) % world, (rank - 1) % world
    came = torch.empty(3)
    for work in comm.start_exchange(
        group, sends=[(torch.full((3,), float(rank)), after)], receives=[(came, before)]
    ):
        work.wait()
    assert (came == before).all()
    if rank == 0:
        comm.send(torch.arange(4.0), 1, group)
    elif rank == 1:
        comm.receive(found := torch.empty(4), 0, group)
        assert torch.equal(found, torch.arange(4.0))


def test_messages_between_ranks():
    run_ranks(3, messages)


ENDS = """
import atexit, time
slept = []
time.sleep = slept.append
import torch, torch.distributed as dist
from cai_mesh import comm
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(lambda: None)
{}
atexit._run_exitfuncs()
print(slept)
"""


@pytest.mark.parametrize(
    ("does", "slept"), [("", "[]"), ("comm.all_reduce(torch.ones(1), dist.group.WORLD)", "[0.2]")]
)
def test_only_a_process_that_used_gloo_pauses_at_its_end(does, slept):
    ended = subprocess.run(
        [sys.executable, "-c", ENDS.format(does)], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == slept


@pytest.mark.parametrize("world", [2, 3])
def test_pairs_mean_what_one_process_does(world):
    run_ranks(world, pairs, False)


def test_pairs_are_traced_whole():
    run_ranks(2, pairs, True, timeout=120)
