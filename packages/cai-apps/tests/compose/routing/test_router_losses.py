"""Losses of routers are those of transformers, on every layout: losses, gradients and weights after three steps."""

from __future__ import annotations

import functools

import pytest
import torch
from layouts import BATCH, Case
from routed_toys import AUX, ROUTED, Z, plain_training, routed_training

from cai_apps.config.sections import Experts
from cai_mesh.testing import assert_same_as_one_device, run_ranks

BOTH = Experts(aux_loss=AUX, z_loss=Z)
expected = functools.cache(plain_training)


def check(name: str, case: Case, experts: Experts = BOTH):
    passes = BATCH // max(1, BATCH // (case.data * case.replicate) // case.microbatches)
    losses, numbers, parameters = expected(name, experts, passes)
    results = run_ranks(case.world, routed_training, name, case, experts, timeout=240)
    got_losses, got_numbers, got_parameters = results[0]
    assert got_losses == pytest.approx(losses, rel=1e-6)
    for got, (balance, z) in zip(got_numbers, numbers, strict=True):
        assert got["aux_loss"] == pytest.approx(balance, rel=1e-5)
        assert got["z_loss"] == pytest.approx(z, rel=1e-5)
    assert all(other[1] == got_numbers for other in results)
    assert_same_as_one_device(got_parameters, parameters, tolerance=1e-4)
    return numbers


@pytest.mark.parametrize("name", list(ROUTED))
def test_one_rank_equals_transformers(name):
    check(name, Case(microbatches=1))
