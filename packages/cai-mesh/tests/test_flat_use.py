"""A flat parameter is shown in the shape of the whole one; what would need the rest of it in a graph is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.gradients import Place, ShardGradient, ShardParameter, flat_of, raw_grad, set_raw_grad

WHOLE = torch.Size((2, 3))


@pytest.fixture
def flat() -> nn.Parameter:
    """The last four elements of a parameter [2, 3], of which others have the rest."""
    param, used = nn.Parameter(torch.arange(2.0, 6.0)), nn.Parameter(torch.zeros(WHOLE))
    place = Place(WHOLE, 2, 6, beyond=True)
    keeper = SimpleNamespace(
        steps=True, leaf=lambda index: used, about_to_write=lambda index: None, place=lambda index: place
    )
    ShardParameter.adopt(param, keeper, 0)  # type: ignore[arg-type]
    return param


def test_it_is_described_as_the_whole(flat):
    assert flat.shape == WHOLE and flat.numel() == 6 and flat.dim() == 2 and flat.stride() == (3, 1)
    assert len(flat) == 2 and flat.size(1) == 3 and flat.nelement() == 6
    assert flat.dtype == torch.float32 and flat.device.type == "cpu" and flat.requires_grad and flat.is_leaf
    assert isinstance(flat.data, ShardGradient) and flat.data.shape == flat.detach().shape == WHOLE


def test_what_is_here_of_it_is_flat(flat):
    assert torch.equal(flat_of(flat), torch.arange(2.0, 6.0))
    assert raw_grad(flat) is None
    set_raw_grad(flat, torch.ones(4))
    assert torch.equal(raw_grad(flat), torch.ones(4))
    set_raw_grad(flat, None)
    assert raw_grad(flat) is None


def test_its_elements_may_be_used(flat):
    assert torch.equal((flat * 2).detach().part, torch.arange(2.0, 6.0) * 2)
    assert torch.equal((flat + torch.ones(WHOLE)).detach().part, torch.arange(3.0, 7.0))
    flat.data.mul_(2)
    assert torch.equal(flat_of(flat), torch.arange(2.0, 6.0) * 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.T,
        lambda p: p @ torch.ones(3),
        lambda p: p[0],
        lambda p: p + torch.ones(2, 1),
        lambda p: nn.functional.linear(torch.ones(1, 3), p),
    ],
)
def test_what_takes_it_for_the_whole_is_refused(flat, use):
    with pytest.raises(PlanError, match="outside its block"):
        use(flat)


@pytest.mark.parametrize("value", [torch.zeros(4), torch.zeros(WHOLE)])
def test_other_data_is_refused(flat, value):
    with pytest.raises(PlanError, match="another tensor was put in the data"):
        flat.data = value


def test_what_is_written_to_a_part_is_counted(flat):
    """By whoever has copies of the values elsewhere, and looks at the version."""
    for write in (lambda: flat.detach().mul_(2), lambda: flat.detach().to_local().mul_(2)):
        before = flat._version
        write()
        assert flat._version > before
