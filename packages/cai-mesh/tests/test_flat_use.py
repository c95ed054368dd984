"""A flat parameter tells what it is; it is not taken for the whole one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.gradients import ShardParameter, raw_grad, set_raw_grad


@pytest.fixture
def flat() -> nn.Parameter:
    """Six elements of a parameter [2, 3]."""
    param, whole = nn.Parameter(torch.arange(6.0)), nn.Parameter(torch.zeros(2, 3))
    keeper = SimpleNamespace(steps=True, leaf=lambda index: whole, about_to_write=lambda index: None)
    ShardParameter.adopt(param, keeper, 0)  # type: ignore[arg-type]
    return param


def test_it_may_be_described(flat):
    assert flat.shape == (6,) and flat.numel() == 6 and flat.dim() == 1 and flat.stride() == (1,)
    assert flat.dtype == torch.float32 and flat.device.type == "cpu" and flat.requires_grad and flat.is_leaf
    assert flat.data.sum() == 15 and flat.untyped_storage().nbytes() == 24
    assert raw_grad(flat) is None
    set_raw_grad(flat, torch.ones(6))
    assert torch.equal(raw_grad(flat), torch.ones(6))
    set_raw_grad(flat, None)
    assert raw_grad(flat) is None


def test_its_elements_may_be_used(flat):
    assert (flat * 2).sum() == 30
    assert (flat + torch.ones(6)).sum() == 21


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.T,
        lambda p: p @ torch.ones(6),
        lambda p: p[0],
        lambda p: p + torch.ones(2, 1),
        lambda p: setattr(p, "data", torch.zeros(4)),
        lambda p: nn.functional.linear(torch.ones(1, 6), p),
    ],
)
def test_what_takes_it_for_the_whole_is_refused(flat, use):
    with pytest.raises(PlanError, match="outside its block"):
        use(flat)
