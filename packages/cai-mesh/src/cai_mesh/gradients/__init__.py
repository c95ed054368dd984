"""Gradients of linear layers and chunks, and norms over any mix of layouts."""

from __future__ import annotations

from cai_mesh.gradients.buffer import Deferred, GradBuffer, accumulate_node, check_no_gradients, defer
from cai_mesh.gradients.linear import (
    LOCAL,
    Local,
    Ready,
    direct_linears,
    own_products,
    register,
    route,
    routed,
)
from cai_mesh.gradients.norm import clip_factor, clip_grad_norm_, grad_norm, norm_of_squares
from cai_mesh.gradients.products import PLAIN, TRANSPOSED, PlainProducts

__all__ = [
    "LOCAL",
    "PLAIN",
    "TRANSPOSED",
    "Deferred",
    "GradBuffer",
    "Local",
    "PlainProducts",
    "Ready",
    "accumulate_node",
    "check_no_gradients",
    "clip_factor",
    "clip_grad_norm_",
    "defer",
    "direct_linears",
    "grad_norm",
    "norm_of_squares",
    "own_products",
    "register",
    "route",
    "routed",
]
