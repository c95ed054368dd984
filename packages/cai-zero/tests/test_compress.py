"""Compressed collectives against plain ones: same numbers on all ranks, bounded errors, nothing lost over time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from cai_mesh.errors import PlanError
from cai_mesh.testing import run_ranks
from cai_zero.reduction import compression as compress
from cai_zero.reduction.compression import Compression, all_gather_compressed, reduce_scatter_compressed
from cai_zero.reduction.quantization import ERROR

FORMS = ("int8", "fp8")


def values(n, seed, dtype=torch.float32):
    """Numbers of many sizes, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(n // 128, 1, generator=generator).mul(8).sub(6).exp()
    return (torch.randn(n // 128, 128, generator=generator) * size).flatten().to(dtype)


def largest(x, block):
    """[n]: the largest magnitude of every element's block."""
    return x.unflatten(-1, (-1, block)).abs().amax(-1, keepdim=True).expand(-1, block).flatten()


# -- gathering ---------------------------------------------------------------------------------------------------


def gather(form, parts, block, out_dtype, in_place, asynchronous):
    rank, world = dist.get_rank(), dist.get_world_size()
    n = 128 * parts
    unsharded = torch.full((world * n,), math.nan, dtype=out_dtype)
    shard = unsharded[rank * n : (rank + 1) * n] if in_place else torch.empty(n)
    shard.copy_(values(n, rank))
    handle = all_gather_compressed(unsharded, shard, dist.group.WORLD, form, block, async_op=asynchronous)
    if asynchronous:
        assert unsharded[((rank + 1) % world) * n :][:n].isnan().all()  # not before `wait`
    handle.wait()
    return unsharded


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("parts", "block", "dtype", "in_place", "asynchronous"),
    [
        (4, 256, torch.float32, True, False),
        (3, 256, torch.bfloat16, True, True),
        (6, 512, torch.float16, False, True),
        (2, 256, torch.float64, False, False),
    ],
)
def test_gathered_weights_are_equal_everywhere_and_near(form, parts, block, dtype, in_place, asynchronous):
    got = run_ranks(3, gather, form, parts, block, dtype, in_place, asynchronous)
    assert got[0].dtype == dtype
    assert all(torch.equal(got[0], other) for other in got)
    block = math.gcd(128 * parts, block)
    plain = torch.cat([values(128 * parts, rank) for rank in range(3)])
    if in_place:
        plain = plain.to(dtype).float()
    room = 1 + 2 * torch.finfo(dtype).eps / ERROR[form] if dtype.itemsize == 2 else 1 + 1e-5
    bound = ERROR[form] * largest(plain, block) * room
    assert torch.all((got[0].float() - plain).abs() <= bound)
    assert not torch.equal(got[0].float(), plain)


# -- reducing ----------------------------------------------------------------------------------------------------


def reduce_once(form, parts, dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    full = values(128 * parts * world, 10 + rank, dtype)
    residual = torch.zeros_like(full)
    shard = torch.empty(128 * parts, dtype=dtype)
    reduce_scatter_compressed(shard, full, dist.group.WORLD, form, 256, residual)
    return shard, residual


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("parts", "dtype"), [(4, torch.float64), (3, torch.float32), (2, torch.bfloat16)])
def test_a_reduction_is_near_and_what_is_missing_is_in_the_residuals(form, parts, dtype):
    got = run_ranks(3, reduce_once, form, parts, dtype)
    given = [values(128 * parts * 3, 10 + rank, dtype).double() for rank in range(3)]
    total, summed = sum(given), torch.cat([shard for shard, _ in got]).double()
    block = math.gcd(128 * parts, 256)
    bound = sum(ERROR[form] * largest(g, block) for g in given) * (1 + 1e-5)
    fine = 8 * torch.finfo(dtype).eps * sum(g.abs() for g in given) + 2 * torch.finfo(dtype).eps * bound
    assert torch.all((summed - total).abs() <= bound + fine)
    assert not torch.allclose(summed, total, rtol=1e-4, atol=0)
    restored = summed + sum(residual.double() for _, residual in got)
    assert torch.all((restored - total).abs() <= fine + 1e-6 * bound)


def reduce_often(form, steps, feedback):
    """The same gradient every step, of which each element's error is the same without feedback."""
    rank, world = dist.get_rank(), dist.get_world_size()
    gradient = values(256 * world, 20 + rank)
    residual = torch.zeros_like(gradient) if feedback else None
    mean = torch.zeros(256, dtype=torch.float64)
    for _ in range(steps):
        shard = torch.empty(256)
        reduce_scatter_compressed(shard, gradient.clone(), dist.group.WORLD, form, 256, residual)
        mean += shard.double() / steps
    return mean


@pytest.mark.parametrize("form", FORMS)
def test_error_feedback_makes_the_mean_over_time_exact(form):
    steps = 50
    plain = sum(values(512, 20 + rank).double() for rank in range(2))
    limit = sum(ERROR[form] * largest(values(512, 20 + rank).double(), 256) for rank in range(2)) * 1.1
    with_feedback = torch.cat(run_ranks(2, reduce_often, form, steps, True))
    without = torch.cat(run_ranks(2, reduce_often, form, steps, False))
    # The sum of all that was sent is the sum of all gradients but for one residual a rank.
    assert torch.all((with_feedback - plain).abs() <= limit / steps + 1e-6 * plain.abs())
    assert ((with_feedback - plain).abs() / limit).max() < 0.1 * ((without - plain).abs() / limit).max()


def reduce_non_finite(form, bad):
    rank = dist.get_rank()
    full = torch.ones(1024)
    if rank == 1:
        full[700] = bad
    residual, shard = torch.zeros(1024), torch.empty(512)
    reduce_scatter_compressed(shard, full, dist.group.WORLD, form, 256, residual)
    first = shard.isfinite()
    reduce_scatter_compressed(shard, torch.ones(1024), dist.group.WORLD, form, 256, residual)
    return first, shard, residual


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_seen_and_forgotten(form, bad):
    (clean, *_), (hit, *_) = results = run_ranks(2, reduce_non_finite, form, bad)
    assert clean.all()
    assert hit.tolist() == [False] * 256 + [True] * 256  # elements 512 + 0 .. 255 share a block with 700
    for _, shard, residual in results:
        assert residual.isfinite().all()
        assert torch.allclose(shard, torch.full_like(shard, 2.0), rtol=1e-6)


def test_a_world_of_one_is_exact():
    x = values(256, 0)
    unsharded, shard, residual = torch.empty(256), torch.empty(256), torch.ones(256)
    all_gather_compressed(unsharded, x, None, "int8").wait()
    reduce_scatter_compressed(shard, x, None, "int8", 256, residual)
    assert torch.equal(unsharded, x)
    assert torch.equal(shard, x)
    assert torch.equal(residual, torch.ones(256))


def traffic(form):
    """(name, dtype, bytes given) of every collective of one gather and one reduction of 2 x 512 float32 numbers."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name, given in (("all_gather_into", 1), ("all_to_all_into", 1)):
            plain = getattr(compress, name)

            def counted(*args, name=name, given=given, plain=plain, **options):
                calls.append((name, args[given].dtype, args[given].nbytes))
                return plain(*args, **options)

            patch.setattr(compress, name, counted)
        all_gather_compressed(torch.empty(1024), torch.ones(512), dist.group.WORLD, form).wait()
        reduce_scatter_compressed(torch.empty(512), torch.ones(1024), dist.group.WORLD, form)
    return calls


@pytest.mark.parametrize("form", FORMS)
def test_what_travels_is_a_byte_an_element_in_one_collective(form):
    gathered = ("all_gather_into", torch.uint8, 512 + 4 * 2)
    reduced = ("all_to_all_into", torch.uint8, 1024 + 4 * 4)
    assert run_ranks(2, traffic, form) == [[gathered, reduced]] * 2


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weights": "int4"}, "unknown form"),
        ({"gradients": "fp16"}, "unknown form"),
        ({"weights": "int8", "block": 0}, "alignment"),
        ({"gradients": "fp8", "block": 200}, "alignment"),
    ],
)
def test_compressions_that_do_not_exist(options, match):
    with pytest.raises(PlanError, match=match):
        Compression(**options)


def unequal():
    with pytest.raises(PlanError, match="equal parts"):
        all_gather_compressed(torch.empty(385), torch.empty(192), dist.group.WORLD, "int8")
    with pytest.raises(PlanError, match="equal parts"):
        reduce_scatter_compressed(torch.empty(193), torch.empty(386), dist.group.WORLD, "int8")


def test_tensors_that_cannot_be_cut_in_equal_parts():
    run_ranks(2, unequal)
