"""Weights in 8 bits, computed with in the dtype of the model: W8A16.

The weight w of an output channel is stored as q, int8 or float8_e4m3fn, with one float32 scale s = max |w| / max q, and
q is the number nearest to w / s. A layer that runs makes q s of it, in its own dtype, for as long as it runs. So each
weight is off by s / 2 at most in int8; in fp8 by |w| / 16, or by s / 1024 where that is more (Micikevicius et al.,
arXiv:2209.05433). The rounding of the dtype comes on top. Activations are not quantized, unlike in
`cai_kernels.fp8_linear`, which casts both sides of a product and keeps the weight it was made from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from cai_mesh.errors import ConfigError

Kind = Literal["int8", "fp8"]
KINDS: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max),
}
"""The dtype that weights are stored in, and its largest number that is used."""


def quantize(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """A weight [out, ...] -> values of the same shape in 8 bits, and scales float32 [out].

    The scale of a row that is not finite is not finite. Each step is exact, or rounded to nearest in float32, on every
    device: so a GPU finds the bits that the host finds.
    """
    dtype, most = KINDS[kind]
    weight = weight.detach()
    rows = weight.flatten(1)
    largest = torch.maximum(rows.amax(1), rows.amin(1).neg()).float()
    scale = largest / torch.full_like(largest, most)  # a GPU multiplies by the reciprocal of a mere number
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    shares = weight.to(torch.float32, copy=True).div_(_beside(scale, weight))
    if dtype == torch.int8:
        shares.round_()
    return shares.clamp_(-most, most).to(dtype), scale


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """values scale, rounded once: 8-bit numbers are exact in 16 bits, and the product is made in float32 or more."""
    if values.dtype == torch.int8 and dtype != torch.float64:  # one kernel
        return torch.mul(values, _beside(scale, values), out=torch.empty_like(values, dtype=dtype))
    return values.to(dtype).mul_(_beside(scale, values))


def _beside(scale: Tensor, weight: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (weight.dim() - 1))


class _Quantized(nn.Module):
    """The weight of a layer as `values` and `scale`; `compute` is its dtype."""

    values: Tensor
    scale: Tensor
    compute: torch.dtype

    @property
    def weight(self) -> Tensor:
        return dequantize(self.values, self.scale, self.compute)


class QuantizedLinear(_Quantized, nn.Linear):  # type: ignore[misc]
    """`nn.Linear` whose weight is made anew each time it is asked for."""


class QuantizedConv2d(_Quantized, nn.Conv2d):  # type: ignore[misc]
    """`nn.Conv2d` whose weight is made anew each time it is asked for."""


CLASSES: dict[type[nn.Module], type[_Quantized]] = {nn.Linear: QuantizedLinear, nn.Conv2d: QuantizedConv2d}


def quantize_layers(
    layers: Iterable[tuple[str, nn.Module]], kind: Kind, device: torch.device | str | None = None
) -> list[str]:
    """Quantize the linear layers and convolutions inside some layers, one after the other, in place.

    Embedders of times and labels (`emb`) stay as they are, and so do norms, tables and biases.

    Args:
        layers: the layers with their names; a module in two of them is changed once.
        device: computes what is stored, of one weight at a time; the result goes to where the weight was. None: there.

    Returns the names of what was quantized. Raises `ConfigError` where nothing is, or where a weight is not finite.
    """
    quantized_names = []
    for outer, layer in layers:
        for name, module in layer.named_modules(prefix=outer):
            if type(module) in CLASSES and "emb" not in name.split("."):
                _change(name, module, kind, device)
                quantized_names.append(name)
    if not quantized_names:
        raise ConfigError(
            f"no weights that {kind} could store",
            expected="linear layers or convolutions inside blocks",
            fix="leave out --weights",
        )
    return quantized_names


def _change(name: str, layer: nn.Module, kind: Kind, device: torch.device | str | None) -> None:
    weight = layer._parameters.pop("weight")
    assert weight is not None
    quantized = quantize(weight if device is None else weight.to(device), kind)
    values, scale = (tensor.to(weight.device) for tensor in quantized)
    if not scale.isfinite().all():
        raise ConfigError(
            f"the weight of {name} is not finite", cause="the file is damaged, or training diverged"
        )
    layer.__class__ = CLASSES[type(layer)]
    layer.register_buffer("values", values)
    layer.register_buffer("scale", scale)
    layer.compute = weight.dtype  # type: ignore[assignment]
