"""A linear layer with a quantized weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cai_kernels.errors import KernelError
from cai_kernels.quantized_linear.function import dequantize, quantize, quantized_linear
from cai_kernels.quantized_linear.kinds import QuantizedKind, check_features, shapes_of


class QuantizedLinear(nn.Module):
    """`nn.Linear` with a weight in 4 or 8 bits that does not train, through `quantized_linear`.

    The input's dtype is that of the product and the result. Casts of the module (`to`, `bfloat16`, `type`) change the
    bias alone: codes stay codes and scales float32. Codes and scales begin without meaningful values;
    `write_weight` or a state dict brings them.

    Attributes:
        weight: the codes, uint8 [out, in / 2] (nf4) or int8 [out, in]; a parameter without gradient.
        scales: float32 [out, in / 64] (nf4) or [out, 1] (int8); a buffer, which nobody casts to the dtype of products.
        bias: a parameter [out], or None.
    """

    scales: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kind: QuantizedKind,
    ):
        """Make a layer whose codes and scales are zeros, which both kinds read as a weight of zeros.

        Args:
            in_features, out_features, bias, device: as in `nn.Linear`; inputs of nf4 are a multiple of 64.
            dtype: the bias's dtype.
            kind: "nf4" or "int8".
        """
        super().__init__()
        check_features(in_features, out_features, kind)
        self.in_features, self.out_features, self.kind = in_features, out_features, kind
        shapes = shapes_of(in_features, out_features, kind)
        codes = torch.zeros(shapes.codes, dtype=shapes.dtype, device=device)
        scales = torch.zeros(shapes.scales, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scales", scales)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, kind: QuantizedKind) -> QuantizedLinear:
        """Return a layer with the weight of `linear` quantized and its bias itself, where those are.

        A layer without values, on the meta device or fake, gives one. Raises `KernelError` as `quantize` does.
        """
        new = cls(linear.in_features, linear.out_features, bias=False, device="meta", kind=kind)
        codes, scales = quantize(linear.weight, kind)
        new.weight = nn.Parameter(codes, requires_grad=False)
        new.scales = scales
        new.bias = linear.bias
        return new.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features]."""
        return quantized_linear(input, self.weight, self.scales, self.bias, kind=self.kind)

    @torch.no_grad()
    def write_weight(self, weight: torch.Tensor) -> None:
        """Quantize weight [out, in], of any device and floating dtype, into the codes and scales, in place.

        It is computed on the layer's device. Raises `KernelError`, with the layer as it was, for a weight that does not
        fit or is not finite, and for a layer on the meta device.
        """
        if weight.shape != (self.out_features, self.in_features):
            raise KernelError(
                "weight does not fit the layer",
                got=tuple(weight.shape),
                expected=str((self.out_features, self.in_features)),
            )
        if self.weight.is_meta:
            raise KernelError(
                "the layer has no memory yet", got="meta", fix="call to_empty(device=...) first"
            )
        codes, scales = quantize(weight.to(self.weight.device), self.kind)
        self.weight.copy_(codes)
        self.scales.copy_(scales)

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return the weight [out, in] in a dtype, as `dequantize` does."""
        return dequantize(self.weight, self.scales, self.kind, dtype)

    def extra_repr(self) -> str:
        """Return what `print` shows of the layer."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, {bias=}, kind={self.kind}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        stored = (self.weight, self.scales)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            changed = moved.dtype != tensor.dtype and any(tensor is parameter for parameter in stored)
            return tensor.to(moved.device) if changed else moved

        return super()._apply(move, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load as any module does, but refuse another dtype, which `copy_` would cast: a weight in full to integers."""
        for name in ("weight", "scales"):
            tensor, dtype = state_dict.get(prefix + name), getattr(self, name).dtype
            if isinstance(tensor, torch.Tensor) and tensor.dtype != dtype:
                raise KernelError(
                    f"{prefix}{name} is not what a layer in {self.kind} stores",
                    got=tensor.dtype,
                    expected=dtype,
                    fix="give the layer a weight in full by write_weight",
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)
