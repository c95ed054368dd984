"""Losses of routers are those of transformers, on every layout: losses, router losses and weights after three steps."""

from __future__ import annotations

import functools

import pytest
from layouts import BATCH, Case
from routed_toys import AUX, ROUTED, Z, plain_training, routed_training

from cai_apps.config.sections import Experts
from cai_mesh.testing import assert_same_as_one_device, run_ranks

BOTH = Experts(aux_loss=AUX, z_loss=Z)
expected = functools.cache(plain_training)


def check(name: str, case: Case, experts: Experts = BOTH) -> None:
    """Compare a layout with the plain loop over as many parts of a batch as it has microbatches on all data ranks."""
    ranks = case.data * case.replicate
    passes = BATCH // max(1, BATCH // ranks // case.microbatches)
    losses, numbers, parameters = expected(name, experts, passes)
    results = run_ranks(case.world, routed_training, name, case, experts, timeout=240)
    got_losses, got_numbers, got_parameters = results[0]
    assert got_losses == pytest.approx(losses, rel=1e-5)
    for got, (balance, z) in zip(got_numbers, numbers, strict=True):
        assert got["aux_loss"] == pytest.approx(balance, rel=1e-5)
        assert got["z_loss"] == pytest.approx(z, rel=1e-4)
        assert got["dropped_share"] == 0
    for _, other_numbers, _ in results[1:]:
        assert other_numbers == got_numbers
    assert_same_as_one_device(got_parameters, parameters, tolerance=1e-5)


@pytest.mark.parametrize("name", list(ROUTED))
def test_one_rank_equals_transformers(name):
    check(name, Case(microbatches=1))


LAYOUTS = {
    "accumulation": Case(microbatches=2),
    "recompute": Case(microbatches=2, recompute="full"),
    "data2-zero2": Case(data=2, zero=2, microbatches=1),
    "data2-zero3": Case(data=2, zero=3, microbatches=2),
    "data2-zero3-recompute": Case(data=2, zero=3, microbatches=2, recompute="full"),
    "tensor2": Case(tensor=2, microbatches=1),
    "tensor2-sequence": Case(tensor=2, sequence=True, microbatches=1),
    "data2-experts2": Case(data=2, experts=2, microbatches=1),
    "data2-tensor2-experts2-zero3": Case(data=2, tensor=2, experts=2, zero=3, microbatches=1),
    "data2-pipeline2-experts2-recompute": Case(
        data=2, pipeline=2, experts=2, recompute="full", microbatches=1
    ),
    "pipeline2": Case(pipeline=2, microbatches=2),
    "pipeline2-interleaved": Case(pipeline=2, chunks=2, schedule="interleaved", microbatches=4),
    "pipeline2-zb-v": Case(pipeline=2, chunks=2, schedule="zb-v", microbatches=4),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout_equals_transformers(layout):
    check("olmoe", LAYOUTS[layout])


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_stages_of_other_kinds_equal_transformers(name):
    """The first stage of the last has no router: sums begin with those of the next."""
    check(name, Case(pipeline=2, data=2, microbatches=1))


def test_without_losses_nothing_travels():
    case = Case(pipeline=2, microbatches=2)
    losses, _, parameters = expected("olmoe", Experts(aux_loss=0.0), 2)
    got_losses, numbers, got_parameters = run_ranks(
        2, routed_training, "olmoe", case, Experts(aux_loss=0.0), timeout=240
    )[0]
    assert got_losses == pytest.approx(losses, rel=1e-6)
    assert "aux_loss" not in numbers[0]
    assert_same_as_one_device(got_parameters, parameters, tolerance=1e-5)


def test_loads_are_those_of_all_ranks():
    """A router's loads over stages and data ranks are those of one process."""
    alone = run_ranks(1, routed_training, "olmoe", Case(microbatches=2), BOTH, 1)[0][1]
    spread = run_ranks(4, routed_training, "olmoe", Case(pipeline=2, data=2, microbatches=1), BOTH, 1)[0][1]
    loads = [name for name in alone[0] if name.startswith(("load", "routing", "dropped"))]
    assert len(loads) == 8
    for name in loads:
        assert spread[0][name] == pytest.approx(alone[0][name], rel=1e-9), name
