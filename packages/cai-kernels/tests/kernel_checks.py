"""The device, shapes and dtypes that kernels are tested with, and what several of them are held to alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cai_kernels.testing import results

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(5, 123, 123), (1, 64), (7, 1), (0, 16), (3, 4, 1000)]
"""Of rows: odd ones, one alone, of one column, none, and long ones."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_the_same_twice(kernel: Callable, inputs: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor]):
    """Outputs and gradients of two runs, bit for bit."""
    first, second = (results(kernel, inputs, upstream) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def assert_gradients_alone(kernel: Callable, inputs: Sequence[torch.Tensor], dy: torch.Tensor, wanted):
    """Of one input at a time, while the others need none."""
    for leaf, expected in zip(inputs, wanted, strict=True):
        leaf.requires_grad_()
        kernel(*inputs).backward(dy)
        torch.testing.assert_close(leaf.grad, expected)
        leaf.requires_grad_(False)
