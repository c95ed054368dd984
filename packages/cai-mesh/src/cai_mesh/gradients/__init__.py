"""Gradients of linear layers and chunks, and norms over any mix of layouts."""

from __future__ import annotations

from cai_mesh.gradients.buffer import Deferred, GradBuffer, accumulate_node, check_no_gradients, defer
from cai_mesh.gradients.gradient_views.backward_inputs import backward_asks_inputs, backward_to_used
from cai_mesh.gradients.gradient_views.flat_use import LOOKS, check_flat_use
from cai_mesh.gradients.gradient_views.flat_value import SHAPES, use_flat, value_of, whole_of
from cai_mesh.gradients.gradient_views.parameters import (
    GradientKeeper,
    ShardParameter,
    ShownParameter,
    check_same_data,
    flat_of,
    hide,
    in_backward,
    is_kept,
    local_gradient,
    plain,
    raw_grad,
    set_raw_grad,
    show,
)
from cai_mesh.gradients.gradient_views.place import Place
from cai_mesh.gradients.gradient_views.shard_gradient import ShardGradient, shown
from cai_mesh.gradients.linear.products import PLAIN, TRANSPOSED, PlainProducts
from cai_mesh.gradients.linear.readers import Readers, Reading, share_in_graphs
from cai_mesh.gradients.linear.seam import (
    LOCAL,
    Local,
    Ready,
    add_weight_gradient,
    by_rule,
    direct_linears,
    own_products,
    register,
    route,
    routed,
)
from cai_mesh.gradients.norm import clip_factor, clip_grad_norm_, grad_norm, norm_of_squares

__all__ = [
    "LOCAL",
    "LOOKS",
    "PLAIN",
    "SHAPES",
    "TRANSPOSED",
    "Deferred",
    "GradBuffer",
    "GradientKeeper",
    "Local",
    "Place",
    "PlainProducts",
    "Readers",
    "Reading",
    "Ready",
    "ShardGradient",
    "ShardParameter",
    "ShownParameter",
    "accumulate_node",
    "add_weight_gradient",
    "backward_asks_inputs",
    "backward_to_used",
    "by_rule",
    "check_flat_use",
    "check_no_gradients",
    "check_same_data",
    "clip_factor",
    "clip_grad_norm_",
    "defer",
    "direct_linears",
    "flat_of",
    "grad_norm",
    "hide",
    "in_backward",
    "is_kept",
    "local_gradient",
    "norm_of_squares",
    "own_products",
    "plain",
    "raw_grad",
    "register",
    "route",
    "routed",
    "set_raw_grad",
    "share_in_graphs",
    "show",
    "shown",
    "use_flat",
    "value_of",
    "whole_of",
]
