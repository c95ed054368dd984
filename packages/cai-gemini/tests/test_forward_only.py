"""A model on the host whose layers come to the device for their forwards, beside the same model left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cai_gemini import HostModel
from cai_mesh.errors import PlanError


class Part(nn.Sequential):
    """A layer that also adds what it holds in 8 bits."""

    def forward(self, x):
        x = torch.tanh(super().forward(x))
        for extra in ("small", "eight"):
            if hasattr(self, extra):
                x = x + getattr(self, extra).float()
        return x


class Toy(nn.Module):
    """Layers with parameters and buffers of several dtypes, one tied to the input; they run in a given order."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Part(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)])
        self.layers[1][0].weight = self.first.weight
        self.layers[2].register_buffer("small", torch.arange(-3, 5, dtype=torch.int8))
        self.layers[3].register_buffer("eight", torch.randn(8).to(torch.float8_e4m3fn))

    def forward(self, x, order=(0, 1, 2, 3)):
        x = self.first(x)
        for number in order:
            x = self.layers[number](x)
        return x


def pair() -> tuple[nn.Module, HostModel]:
    torch.manual_seed(0)
    plain = Toy().eval().requires_grad_(False)
    twin = copy.deepcopy(plain)
    return plain, HostModel(twin, "cpu", list(twin.layers))


def test_forwards_are_those_of_the_model_left_alone():
    plain, away = pair()
    x = torch.randn(5, 8)
    with pytest.raises(PlanError, match="on the host"):
        away.model(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), away:
            for order in ((0, 1, 2, 3), (0, 1, 2, 3), (3, 0, 0, 1), (2,), (0, 1, 2, 3)):
                assert torch.equal(away.model(x, order), plain(x, order))
    sizes = sorted(layer.nbytes for layer in away._layers.values())
    around = plain.first.weight.nbytes + plain.first.bias.nbytes
    assert away.most <= around + sum(sizes[-2:]), "a layer that was expected in vain is dropped"
    for name, value in plain.state_dict().items():
        assert torch.equal(value.float(), away.model.state_dict()[name].float()), name


def test_two_layers_are_there_at_most():
    plain, away = pair()
    seen: list[int] = []
    for layer in away.model.layers:
        layer[0].register_forward_hook(lambda *_: seen.append(away.resident))
    sizes = [layer.nbytes for layer in away._layers.values()]
    around = plain.first.weight.nbytes + plain.first.bias.nbytes
    assert away.resident == 0
    with torch.no_grad(), away:
        for _ in range(2):
            away.model(torch.randn(5, 8))
    first, second = seen[:4], seen[4:]
    assert first == [around + size for size in sizes], "nothing is known of what follows"
    assert second == [around + sizes[i] + sizes[(i + 1) % 4] for i in range(4)]
    assert away.resident == 0 and away.most == max(second)


def test_a_forward_that_fails_leaves_nothing():
    plain, away = pair()
    x = torch.randn(5, 8)
    with torch.no_grad():
        with pytest.raises(IndexError), away:
            away.model(x, (0, 1, 9))
        assert away.resident == 0
        with away:
            assert torch.equal(away.model(x), plain(x))


def test_a_whole_model_comes_and_goes():
    plain, _ = pair()
    away = HostModel(copy.deepcopy(plain), "cpu")
    with torch.no_grad(), away:
        assert torch.equal(away.model(torch.ones(2, 8)), plain(torch.ones(2, 8)))
        assert away.resident == sum(t.nbytes for t in (*plain.parameters(), *plain.buffers()))
    assert away.resident == 0


def test_layers_that_cannot_be_moved():
    plain, _ = pair()
    with pytest.raises(PlanError, match="part of another"):
        HostModel(plain, "cpu", [plain.layers[0], plain.layers[0][0]])
    with pytest.raises(PlanError, match="does not have"):
        HostModel(plain, "cpu", [nn.Linear(2, 2)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    plain, _ = pair()
    away = HostModel(copy.deepcopy(plain), "cuda", [])
    streamed = copy.deepcopy(plain)
    streamed = HostModel(streamed, "cuda", list(streamed.layers))
    x = torch.randn(5, 8, device="cuda")
    before = torch.cuda.memory_allocated()
    with torch.inference_mode(), away, streamed:
        for _ in range(3):
            assert torch.equal(away.model(x), streamed.model(x))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
