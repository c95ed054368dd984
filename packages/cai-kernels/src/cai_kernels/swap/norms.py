"""Norms, found by what they compute: a leaf with one vector of weights that acts as an RMS or layer norm."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.func import functional_call

from cai_kernels.backend import Backend
from cai_kernels.layer_norm import layer_norm
from cai_kernels.rms_norm import rms_norm
from cai_kernels.swap.record import Swapped, taken

EPSILONS = (1e-12, 1e-2)  # between these a number in a module may be an epsilon
TOLERANCE = 1e-5


def swap_norms(model: nn.Module, record: Swapped, backend: Backend) -> None:
    """Replace the forward of every norm of `model`."""
    known: dict[tuple, tuple[str, str] | None] = {}
    for name, module in model.named_modules():
        if not _may_be_norm(module):
            continue
        key = (type(module), *sorted((n, p.shape) for n, p in module.named_parameters()), *_epsilons(module))
        if key not in known:
            known[key] = _recognize(module)
        found = known[key]
        if found is None:
            continue
        reason = taken(module) or _takes_more(module)
        if reason is not None:
            record.leave(name, "norm", reason)
            continue
        kind, epsilon = found
        described = "layer_norm" if kind == "layer_norm" else f'rms_norm(casting="{kind}")'
        record.put(name, module, _forward(kind, epsilon, backend), "norm", described)


def _takes_more(module: nn.Module) -> str | None:
    """Why a norm that may be given more than its input (a gate, in state space models) is left."""
    inputs = list(inspect.signature(module.forward).parameters)
    return f"its forward takes {', '.join(inputs)}" if len(inputs) > 1 else None


def _forward(kind: str, epsilon: str, backend: Backend) -> Callable:
    if kind == "layer_norm":

        def forward(self, x):
            return layer_norm(
                x, self.weight, getattr(self, "bias", None), getattr(self, epsilon), backend=backend
            )

    else:

        def forward(self, x):
            return rms_norm(x, self.weight, getattr(self, epsilon), casting=kind, backend=backend)  # type: ignore[arg-type]

    return forward


def _may_be_norm(module: nn.Module) -> bool:
    params = dict(module.named_parameters(recurse=False))
    vectors = [p for p in params.values() if p.dim() == 1 and p.is_floating_point()]
    return (
        "weight" in params
        and len(vectors) == len(params) <= 2
        and set(params) <= {"weight", "bias"}
        and next(module.children(), None) is None
        and bool(_epsilons(module))
    )


def _epsilons(module: nn.Module) -> list[tuple[str, float]]:
    low, high = EPSILONS
    return [(n, v) for n, v in vars(module).items() if isinstance(v, float) and low <= v <= high]


def _recognize(module: nn.Module) -> tuple[str, str] | None:
    """Which norm a module computes and the attribute of its epsilon, by trying it on random values."""
    random = torch.Generator().manual_seed(0)
    params = {
        n: torch.randn(p.shape, generator=random) / 4 for n, p in module.named_parameters(recurse=False)
    }
    width = params["weight"].shape[0]
    # small rows, so that the epsilon counts; a mean, so that an RMS norm is no layer norm
    x = torch.randn(2, 3, width, generator=random) / 50 + 0.01
    try:
        with torch.no_grad(), torch.device("cpu"):
            expected = functional_call(module, params, (x,))
    except Exception:
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape:
        return None
    for kind, epsilon, got in _candidates(module, params, x):
        if torch.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return kind, epsilon
    return None


def _candidates(
    module: nn.Module, params: dict[str, torch.Tensor], x: torch.Tensor
) -> Iterator[tuple[str, str, torch.Tensor]]:
    weight = params["weight"]
    for epsilon, value in _epsilons(module):
        yield "layer_norm", epsilon, layer_norm(x, weight, params.get("bias"), value, backend="reference")
        if "bias" not in params:
            for casting in ("llama", "gemma"):
                yield casting, epsilon, rms_norm(x, weight, value, casting=casting, backend="reference")
