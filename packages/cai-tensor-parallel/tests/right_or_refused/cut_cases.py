"""Models that are cut over two ranks: each gives the loss and all gradients of the whole one, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from cai_tensor_parallel import Plan

WIDTH, FEATURES = 8, 12
PLAN = Plan({"up": "colwise", "down": "rowwise"})


class Feed(nn.Module):
    """up, something between, down, twice; what is between has features of one rank when it is cut."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(x)))


class Gated(nn.Module):
    """A number for each token, computed from the whole x on every rank, gates the features."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.up, self.down = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x + self.down(self.up(x) * self.gate(x))


class Scale(nn.Module):
    """A learnable factor for each feature, or one for all."""

    def __init__(self, *shape: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Adapted(nn.Module):
    """A linear layer with a branch of low rank beside it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.a, self.b = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class ScaledLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Noisy(nn.Embedding):
    """Noise on its rows in training."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = super().forward(ids)
        return rows + 0.1 * torch.randn_like(rows) if self.training else rows


def _with_up(change: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    model = Feed(torch.tanh)
    model.up = change(model.up)  # type: ignore[assignment]
    return model


def _halves(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.topk(2, -1).values, x[..., 2:]], -1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: Feed(nn.GELU()),
    "no dropout": lambda: Feed(nn.Dropout(0.0)),
    "prelu": lambda: Feed(nn.PReLU()),
    "scale of all": lambda: Feed(Scale(1)),
    "scale a feature": lambda: Feed(Scale(FEATURES)),
    "layer norm": lambda: Feed(nn.LayerNorm(FEATURES)),
    "softmax": lambda: Feed(nn.Softmax(-1)),
    "normalize": lambda: Feed(lambda x: F.normalize(x, dim=-1)),
    "top-k": lambda: Feed(_halves),
    "gate of whole x": Gated,
    "adapter": lambda: _with_up(Adapted),
    "weight norm": lambda: _with_up(parametrizations.weight_norm),
    "weight norm of hooks": lambda: _with_up(weight_norm),
    "spectral norm": lambda: _with_up(parametrizations.spectral_norm),
    "spectral norm of hooks": lambda: _with_up(spectral_norm),
    "forward of its own": lambda: _with_up(lambda up: ScaledLinear(up.in_features, up.out_features)),
}


def build(name: str) -> nn.Module:
    """In float64, with the same values in every process."""
    torch.manual_seed(3)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.3, 0.4)
    return model


def inputs() -> dict[str, Any]:
    return {"x": torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.sin().sum()
