"""The same training under every layout: each equals the plain single-process loop, step by step."""

from __future__ import annotations

import functools

import pytest
from layouts import BATCH, CASES, FP8, MODES, SWAPPED, UNPLANNED, trained, twin

from cai_mesh.testing import assert_same_as_one_device, run_ranks

CORE = [
    *(("llama", name, "fp64") for name in CASES),
    *(("gpt2", name, "fp64") for name in ("data2-zero3", "tensor2", "pipeline2-1f1b", "2x2x2-zero1")),
    *(("llama", name, "fp32") for name in ("data2-zero2", "tensor2-pipeline2")),
    ("gpt2", "2x2x2-zero1", "fp32"),
    ("llama", "tensor2-sequence", "fp64"),
    ("gpt2", "tensor4-2d", "fp64"),
]
"""Every layout, and every pair of (model, dimension) and (dtype, dimension); the matrix runs the whole product."""

LAYOUTS = {**CASES, **MODES}

expected = functools.cache(twin)


@pytest.mark.parametrize(("model", "layout", "dtype"), CORE)
def test_equals_the_plain_loop(model, layout, dtype):
    losses, gradients, parameters = expected(model, dtype)
    results = run_ranks(LAYOUTS[layout].world, trained, model, LAYOUTS[layout], dtype, timeout=240)
    got_losses, got_gradients, got_parameters = results[0]
    # float32 rounds differently from CPU to CPU, and a difference in the last bit is a thousand times larger after ten
    # steps
    exact = dtype == "fp64"
    tolerance = 1e-9 if exact else 2e-4
    for other in results[1:]:
        assert other == got_losses
    error = max(abs(a - b) for a, b in zip(got_losses, losses, strict=True))
    assert error < (tolerance if exact else tolerance * max(losses))
    assert_same_as_one_device(got_gradients, gradients, tolerance=max(tolerance, 1e-8))
    if exact:
        assert_same_as_one_device(got_parameters, parameters, tolerance=1e-7)


@pytest.mark.parametrize(
    ("model", "layout"), [("gpt2", "data2-zero3"), ("gpt2", "2x2x2-zero1"), ("llama", "one")]
)
def test_with_kernels_it_equals_the_plain_loop(model, layout):
    losses, gradients, _ = expected(model, "fp64")
    results = run_ranks(SWAPPED[layout].world, trained, model, SWAPPED[layout], "fp64", timeout=240)
    got_losses, got_gradients, _ = results[0]
    assert all(other == got_losses for other in results[1:])
    if model == "llama":  # its own norms multiply in float32, ours in float64
        assert got_losses[0] == pytest.approx(losses[0], rel=1e-6)
        assert_same_as_one_device(got_gradients, gradients, tolerance=1e-6)
    else:
        assert max(abs(a - b) for a, b in zip(got_losses, losses, strict=True)) < 1e-9
        assert_same_as_one_device(got_gradients, gradients, tolerance=1e-8)


@pytest.mark.parametrize(
    "layout", [*list(FP8)[:-2], *(pytest.param(name, marks=pytest.mark.matrix) for name in list(FP8)[-2:])]
)
def test_with_fp8_layers_it_equals_the_plain_loop(layout):
    """The twin has the same casts: the same microbatches through `convert_to_fp8`."""
    case = FP8[layout]
    losses, gradients, _ = expected("llama", "fp32", 4, "fp8", max(1, BATCH // case.data // 4))
    results = run_ranks(case.world, trained, "llama", case, "fp32", 4, timeout=240)
    got_losses, got_gradients, _ = results[0]
    assert all(other == got_losses for other in results[1:])
    assert got_losses[:2] == pytest.approx(losses[:2], rel=1e-6)
    assert got_losses == pytest.approx(losses, abs=2e-3)  # a last bit of a weight moves a number in FP8
    assert_same_as_one_device(got_gradients, gradients, tolerance=2e-3)
    plain = expected("llama", "fp32", 4)[1]["model.layers.0.mlp.up_proj.weight"]
    got = got_gradients["model.layers.0.mlp.up_proj.weight"]
    assert (got - plain).norm() > 1e-2 * plain.norm(), "the products were not in FP8"


@pytest.mark.parametrize("layout", list(SWAPPED)[:2])
@pytest.mark.parametrize("model", list(UNPLANNED))
def test_models_without_a_tensor_parallel_plan(model, layout):
    losses, gradients, _ = expected(model, "fp32", 4)
    got_losses, got_gradients, _ = run_ranks(
        SWAPPED[layout].world, trained, model, SWAPPED[layout], "fp32", 4
    )[0]
    assert got_losses == pytest.approx(losses, rel=2e-4)
    assert_same_as_one_device(got_gradients, gradients, tolerance=2e-4)
