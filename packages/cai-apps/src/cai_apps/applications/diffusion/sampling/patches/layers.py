"""Layers of a denoiser that look across the edges of strips are taught to ask their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cai_apps.applications.diffusion.sampling.patches.exchange import Exchange
from cai_apps.applications.diffusion.sampling.patches.strips import (
    Strips,
    edges_of,
    halo_rows,
    moments,
    normalize,
    whole_moments,
)
from cai_mesh.errors import PlanError

PROCESSORS = ("AttnProcessor2_0", "JointAttnProcessor2_0")
"""Attention of diffusers whose keys and values of the picture are `to_k` and `to_v` of its own tokens."""


def check_layers(denoiser: nn.Module, supported: frozenset[str]) -> None:
    """Refuse by name what may mix rows in a way that is not known here.

    Raises:
        PlanError: a layer or an attention of another kind, or a convolution whose strips are not those of one device.
    """
    for name, module in denoiser.named_modules():
        kind = type(module).__name__
        if kind not in supported:
            raise PlanError(f"the layer {name} may mix rows in an unknown way", got=kind)
        if kind == "Attention" and type(module.processor).__name__ not in PROCESSORS:
            raise PlanError(
                f"the attention {name} works in an unknown way",
                got=type(module.processor).__name__,
                expected=" or ".join(PROCESSORS),
            )
        if isinstance(module, nn.Conv2d):
            halo_rows(module, name)


def teach(denoiser: nn.Module, strips: Strips, exchange: Callable[[str], Exchange]) -> None:
    """Change the layers in place.

    Args:
        denoiser: a denoiser that `check_layers` has passed.
        strips: the strips, and which of them is one's own.
        exchange: makes the exchange of a layer from its name.
    """
    for name, module in list(denoiser.named_modules()):
        kind = type(module).__name__
        if isinstance(module, nn.Conv2d):
            rows = halo_rows(module, name)
            if rows:
                module.forward = _conv(module, rows, strips, exchange(name))
        elif isinstance(module, nn.GroupNorm):
            module.forward = _norm(module, strips, exchange(name))
        elif kind == "Attention" and not module.is_cross_attention:
            for part in ("to_k", "to_v"):
                linear: Any = getattr(module, part)
                linear.register_forward_hook(_gathering(strips, exchange(f"{name}.{part}")))
        elif kind == "PatchEmbed":
            module.forward = _embedding(module, strips)
        elif kind == "DiTTransformer2DModel":
            # its forward takes the picture to be square: it is given one with zeros, and the strip is cut out after
            module.proj_out_2.register_forward_hook(lambda _, __, out: strips.widen(out, 1))  # type: ignore[union-attr]


def _conv(conv: nn.Conv2d, rows: int, strips: Strips, exchange: Exchange) -> Callable[[Tensor], Tensor]:
    padding = (0, conv.padding[1])

    def forward(x: Tensor) -> Tensor:
        if x.shape[2] % conv.stride[0]:
            raise PlanError("a strip has rows that a stride does not divide", got=x.shape[2])
        wide = strips.with_halo(x, exchange.all(edges_of(x, rows)), rows)
        return F.conv2d(wide, conv.weight, conv.bias, conv.stride, padding, 1, conv.groups)  # type: ignore[arg-type]

    return forward


def _norm(norm: nn.GroupNorm, strips: Strips, exchange: Exchange) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        strip_moments = moments(x, norm.num_groups)
        return normalize(x, norm, whole_moments(strip_moments, exchange.all(strip_moments), strips.index))

    return forward


def _gathering(strips: Strips, exchange: Exchange) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """A hook: tokens [n, tokens, width] of one's own strip -> those of all strips, one's own fresh."""

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        parts = list(exchange.all(out))
        parts[strips.index] = out
        return torch.cat(parts, 1)

    return hook


def _embedding(embed: nn.Module, strips: Strips) -> Callable[[Tensor], Tensor]:
    """Patches with their places in the whole picture: zeros stand for the other strips, whose tokens are dropped."""
    full_forward = embed.forward

    def forward(x: Tensor) -> Tensor:
        return strips.cut(full_forward(strips.widen(x)), 1)

    return forward
