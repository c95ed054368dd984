"""Gated activations in plain torch (Shazeer, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated(gate: torch.Tensor, up: torch.Tensor | None, kind: str) -> torch.Tensor:
    """a(gate) * up [..., F]; without `up`, gate [..., 2F] holds both halves. `kind` as in `activations`."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    if kind == "silu":
        return F.silu(gate) * up
    if kind == "sigmoid":
        return torch.sigmoid(gate) * up
    return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up
