"""What one comparison of kernels is: inputs, our form, a user's plain form, Liger's, and what must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Args:
        op: its name.
        shape: a label of its sizes.
        make: the inputs on a device; floating ones that require gradients are differentiated.
        ours: what cai_kernels offers, called with the inputs.
        eager: the same in plain torch; compiled by torch.compile too.
        liger: imports Liger-Kernel and returns its form of the same inputs (None: it has none).
        forward_bytes, backward_bytes: what must move, each input read once and each result written once.
        forward_flops, backward_flops: of matrix products.
        others: further forms of ours on the same inputs, by name.
    """

    op: str
    shape: str
    make: Callable[[torch.device], tuple[Any, ...]]
    ours: Callable
    eager: Callable
    liger: Callable[[], Callable] | None = None
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    others: Mapping[str, Callable] = field(default_factory=dict)
