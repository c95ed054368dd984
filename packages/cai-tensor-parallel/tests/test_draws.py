"""Generators where ranks begin to hold different parts, and where they hold the same again."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from cai_tensor_parallel.modes.draws import Draws, draw_inside, drops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def numbers(device: str) -> list[float]:
    return torch.rand(8, device=device).tolist()


def drawn(rank: int, device: str) -> tuple[list[float], list[float], list[float]]:
    """Before a region, in it, and after it."""
    torch.manual_seed(3)
    draws = Draws(rank)
    before = numbers(device)
    draws.enter()
    draws.enter()  # a second layer of the same region
    inside = numbers(device)
    draws.leave()
    draws.leave()
    return before, inside, numbers(device)


@pytest.mark.parametrize("device", DEVICES)
def test_own_numbers_inside_common_ones_outside(device):
    first, second = drawn(0, device), drawn(1, device)
    assert first[0] == second[0] and first[2] == second[2]
    assert first[1] != second[1]
    assert first == drawn(0, device)
    assert len({tuple(part) for part in first}) == 3, "numbers were drawn again"


@pytest.mark.parametrize("device", DEVICES)
def test_regions_differ(device):
    torch.manual_seed(3)
    draws, seen = Draws(0), set()
    for _ in range(4):
        draws.enter()
        seen.add(tuple(numbers(device)))
        draws.leave()
    assert len(seen) == 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inside, self.after = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        return self.after(self.down(self.inside(self.up(x))))


@pytest.mark.parametrize("device", DEVICES)
def test_a_recomputed_block_draws_what_it_drew(device):
    torch.manual_seed(0)
    model = Block().to(device)
    assert drops(model) and not drops(nn.Linear(2, 2))
    draw_inside([model.up], [model.down], model, Draws(1))
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(5)
        x = torch.ones(4, 8, device=device, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        y.sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_evaluation_draws_nothing():
    model = Block().eval()
    draw_inside([model.up], [model.down], model, Draws(1))
    state = torch.get_rng_state()
    model(torch.ones(1, 8))
    assert torch.equal(state, torch.get_rng_state())


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("a batch that fails")


def test_a_forward_that_fails_leaves_the_common_numbers():
    model = nn.Sequential(nn.Linear(8, 8), Fails()).train()
    draw_inside([model[0]], [], model, Draws(1))
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="a batch that fails"):
        model(torch.ones(1, 8))
    got = numbers("cpu")
    torch.manual_seed(1)
    torch.randint(1 << 62, ())
    assert got == numbers("cpu")
