"""Gradients of linear layers and chunks, and norms over any mix of layouts."""

from __future__ import annotations

from cai_mesh.gradients.buffer import GradBuffer, accumulate_node, check_no_gradients
from cai_mesh.gradients.linear import direct_linears
from cai_mesh.gradients.norm import clip_factor, clip_grad_norm_, grad_norm, norm_of_squares

__all__ = [
    "GradBuffer",
    "accumulate_node",
    "check_no_gradients",
    "clip_factor",
    "clip_grad_norm_",
    "direct_linears",
    "grad_norm",
    "norm_of_squares",
]
