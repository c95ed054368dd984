"""Each module by itself: OpenFold's results and gradients, its errors in bf16; and the same of ESMFold's modules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from small_modules import (
    C_S,
    C_Z,
    CASES,
    HEAD,
    HEADS,
    cast,
    frames_of,
    inputs,
    loss,
    typical_error,
)  # fmt: skip
from torch import nn

from cai_apps.applications.protein.model.frames import Frames

MARGIN = 1.02
"""Operators in another order round otherwise, to either side."""


@pytest.fixture(scope="module")
def kept() -> dict[str, torch.Tensor]:
    return load_file(Path(__file__).with_name("openfold_modules.safetensors"))


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float, what: str) -> None:
    """Within a bound of the largest number."""
    off = (found.double() - expected.double()).abs().max().detach() / expected.double().abs().max().detach()
    assert float(off) <= bound, f"{what}: {float(off):.1e} of the largest"


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_openfold(kept, name):
    module = CASES[name].made()
    found = CASES[name].call(module, cast(inputs(), torch.float32))
    loss(found).backward()
    for number, value in enumerate(found):
        assert_close(value, kept[f"{name}.result.{number}"], 1e-5, f"result {number}")
    largest = max(float(param.grad.norm()) for param in module.parameters() if param.grad is not None)
    for own, param in module.named_parameters():
        assert param.grad is not None, own
        grad = param.grad.flatten()
        norm, first, last = kept[f"{name}.gradient.{own}"]
        if float(norm) < 1e-6 * largest:  # zero but for rounding: a number that all scores share
            assert float(grad.norm()) < 1e-6 * largest, own
            continue
        torch.testing.assert_close(grad.norm(), norm, rtol=1e-4, atol=1e-7, msg=own)
        size = float(norm) / len(grad) ** 0.5  # of a number in it
        torch.testing.assert_close(grad[0], first, rtol=1e-4, atol=1e-4 * size + 1e-8, msg=own)
        torch.testing.assert_close(grad[-1], last, rtol=1e-4, atol=1e-4 * size + 1e-8, msg=own)


@pytest.mark.parametrize("name", CASES)
def test_errors_in_bf16_are_not_larger_than_those_of_openfold(kept, name):
    if f"{name}.bf16" not in kept:
        assert name == "recycling embedder", "OpenFold has no bf16 of it"
        return
    half = CASES[name].made().bfloat16()
    found = typical_error(lambda given: CASES[name].call(half, given), CASES[name])
    assert found <= MARGIN * float(kept[f"{name}.bf16"])


# -- ESMFold ------------------------------------------------------------------------------------------------------


SIZES = SimpleNamespace(
    pairwise_state_dim=C_Z, sequence_dim=C_S, pairwise_dim=C_Z, ipa_dim=HEAD, num_heads_ipa=HEADS, num_qk_points=4,
    inf=1e5, epsilon=1e-8,
    num_v_points=8,
)  # fmt: skip
"""By the names in ESMFold's configs; a whole config wants more than these modules read."""


def copy(theirs: nn.Module, name: str) -> nn.Module:
    """Ours with its weights in a module of ESMFold, which mostly has OpenFold's names."""
    ours = CASES[name].made()
    by_name = dict(theirs.named_parameters())
    with torch.no_grad():
        for own, param in ours.named_parameters():
            by_name.pop(esmfold_name(name, own)).copy_(param)
    assert not by_name, sorted(by_name)
    return ours


def esmfold_name(case: str, own: str) -> str:
    return CASES[case].theirs(own).replace("_points.linear.", "_points.")


def compare(theirs: nn.Module, name: str, call) -> None:
    """In float64: scores of points are large, and their rounding in float32 is seen in gradients."""
    ours, given = copy(theirs.eval(), name).double(), cast(inputs(), torch.float64)
    theirs = theirs.double()
    found, expected = CASES[name].call(ours, given), [call(theirs, given)]
    loss(found).backward()
    loss(expected).backward()
    assert_close(found[0], expected[0], 1e-5, name)
    by_name = dict(theirs.named_parameters())
    largest = max(float(param.grad.norm()) for param in ours.parameters() if param.grad is not None)
    for own, param in ours.named_parameters():
        assert param.grad is not None, own
        if (
            float(param.grad.norm()) < 1e-10 * largest
        ):  # zero but for rounding: a number that all scores share
            assert float(by_name[esmfold_name(name, own)].grad.norm()) < 1e-10 * largest, own
            continue
        assert_close(param.grad, by_name[esmfold_name(name, own)].grad, 1e-4, own)


@pytest.mark.parametrize(("way", "outgoing"), [("outgoing", True), ("incoming", False)])
def test_triangle_multiplication_is_that_of_esmfold(way, outgoing):
    from transformers.models.esm.modeling_esmfold import EsmFoldTriangleMultiplicativeUpdate

    theirs = EsmFoldTriangleMultiplicativeUpdate(SIZES, _outgoing=outgoing)
    name = f"triangle multiplication, {way}"
    compare(theirs, name, lambda module, given: module(given["z"], given["z_mask"]))


@pytest.mark.parametrize(("way", "starting"), [("starting", True), ("ending", False)])
def test_triangle_attention_is_that_of_esmfold(way, starting):
    from transformers.models.esm.modeling_esmfold import EsmFoldTriangleAttention

    theirs = EsmFoldTriangleAttention(C_Z, HEAD, HEADS, starting=starting)
    name = f"triangle attention, {way}"
    compare(theirs, name, lambda module, given: module(given["z"], given["z_mask"]))


def test_point_attention_is_that_of_esmfold():
    from transformers.models.esm.modeling_esmfold import EsmFoldInvariantPointAttention
    from transformers.models.esm.openfold_utils import Rigid, Rotation

    theirs = EsmFoldInvariantPointAttention(SIZES)

    def call(module, given):
        frames: Frames = frames_of(given)
        rigid = Rigid(Rotation(rot_mats=frames.rotation), frames.origin)
        return module(given["s"], given["z"], rigid, given["mask"])

    compare(theirs, "point attention", call)
