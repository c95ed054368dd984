"""Gradients of gradients: right where a plain form has them, an error where only the first is known; never zero."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cai_kernels import (
    fp8_linear,
    gate_add,
    geglu,
    group_norm,
    layer_norm,
    linear_cross_entropy,
    modulate,
    rms_norm,
    rope,
    swiglu,
)

ROWS, WIDTH = 3, 8


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


ANGLES = values(1, ROWS, WIDTH // 2).detach()
FUNCTIONS = {
    "rms_norm": lambda x, w, backend: rms_norm(x, w, backend=backend),
    "rms_norm, gemma": lambda x, w, backend: rms_norm(x, w, casting="gemma", backend=backend),
    "layer_norm": lambda x, w, backend: layer_norm(x, w, w * 2, backend=backend),
    "group_norm": lambda x, w, backend: group_norm(x, 2, w, w * 2, silu=True, backend=backend),
    "modulate": lambda x, w, backend: modulate(x[:, None], w * x, w + x, backend=backend),
    "gate_add": lambda x, w, backend: gate_add(x[None], (x * w)[None], w[None], backend=backend),
    "swiglu": lambda x, w, backend: swiglu(x, w * x, backend=backend),
    "geglu": lambda x, w, backend: geglu(x, x + w, backend=backend),
    "rope": lambda x, w, backend: rope(
        (x * x * w)[None, None], x[None, None], ANGLES.cos(), ANGLES.sin(), backend=backend
    )[0],
}


def penalty(function, backend: str) -> list[torch.Tensor]:
    """Gradients of a loss and of the size of its gradients."""
    x, w = values(ROWS, WIDTH), values(WIDTH, seed=1)
    y = function(x, w, backend)
    first = torch.autograd.grad((y.float() ** 3).sum(), (x, w), create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first) + y.sum(), (x, w)))


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_penalty_on_gradients_is_that_of_the_plain_form(name):
    got, want = (penalty(FUNCTIONS[name], backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_has_a_first_derivative_only_says_what_is_plain(backend, reduction):
    x, w, target = values(ROWS, WIDTH), values(5, WIDTH, seed=1), torch.tensor([0, 4, 2])
    loss = linear_cross_entropy(x, w, target, reduction=reduction, backend=backend).mean()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    plain = F.cross_entropy(x @ w.T, target)
    torch.testing.assert_close(first, torch.autograd.grad(plain, x)[0])
    with pytest.raises(RuntimeError, match="cannot be differentiated again") as caught:
        (loss + first.square().sum()).backward()
    assert "functional.linear" in str(caught.value) and "backend='reference'" not in str(caught.value)


def test_no_error_advises_the_backend_that_raised_it():
    """Whatever refuses second derivatives under the reference; FP8's products are those of the reference too."""
    x, w = values(16, 16), values(16, 16, seed=1)
    y = fp8_linear(x, w, backend="reference")
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again") as caught:
        first.square().sum().backward()
    assert "backend='reference'" not in str(caught.value)
