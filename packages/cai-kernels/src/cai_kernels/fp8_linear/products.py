"""The three products of an FP8 linear layer as plain functions of tensors, for whoever runs the layer.

A layer that is cut over ranks, or whose weight gradient goes into a buffer of somebody else, is run by code that knows
of ranks and buffers. It takes the layer's arithmetic from here and calls `forward`, `backward` and one of the two
functions for the weight's gradient; nothing here knows what happens between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cai_kernels.backend import Backend, choose
from cai_kernels.fp8_linear import quantized
from cai_kernels.fp8_linear.checks import SCALINGS, Scaling, check, check_device, check_features
from cai_kernels.fp8_linear.reference import Cast
from cai_kernels.fp8_linear.weight_cache import WeightCache, cast_weight

Tensors = tuple[torch.Tensor, ...]


class InputCache:
    """The cast of the last input, for layers that read the same one (q, k and v; gate and up).

    It is kept until another input comes or the input itself is gone. A compiled graph does not use it: equal casts
    are one there.
    """

    def __init__(self):
        self._clear()

    def _clear(self, *_: object) -> None:
        self._x: Callable[[], torch.Tensor | None] = lambda: None
        self._key: tuple[object, ...] = ()
        self._cast: Cast | None = None

    def __deepcopy__(self, memo: dict) -> InputCache:
        memo[id(self)] = new = InputCache()
        return new

    def __reduce__(self):
        return InputCache, ()

    def get(self, x: torch.Tensor, key: tuple[object, ...], make: Callable[[], Cast]) -> Cast:
        """`make()`, or what it gave for the same values of the same x and `key`."""
        key = (x._version, *key)
        if self._cast is None or self._x() is not x or key != self._key:
            self._x, self._key, self._cast = weakref.ref(x, self._clear), key, make()
        return self._cast


@dataclass(frozen=True)
class Fp8Products:
    """Products of `fp8_linear`; see there for the options.

    Args:
        scaling, fast_accumulate, backend: as in `fp8_linear`.
        weight_cache: keeps the weight's cast between uses, 2 bytes an element; None casts it for every use.
        input_cache: shared by layers that read the same input.
    """

    scaling: Scaling = "tensor"
    fast_accumulate: bool = True
    backend: Backend = "auto"
    weight_cache: WeightCache | None = field(default=None, compare=False)
    input_cache: InputCache = field(default_factory=InputCache, compare=False)

    @property
    def key(self) -> str:
        """Equal for products that make a weight's gradient in the same way."""
        return f"fp8 {self.scaling} {'fast' if self.fast_accumulate else 'exact'} {self.backend}"

    def check_features(self, out_features: int, in_features: int) -> None:
        """Raise `KernelError` for a weight that FP8 products cannot take."""
        check_features(out_features, in_features)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        """x [..., in], weight [out, in] -> (y [..., out], xᵀ in FP8 and its scales)."""
        check(x, weight, bias, self.scaling)
        if self.backend != "reference":
            check_device(x.device)
        triton = self._triton(x)
        cast = self._cast_input(x, keep=weight.requires_grad, triton=triton)
        cast_weight = self._cast_weight(weight, triton)
        y = self._matmul(cast.matrix, cast.scale, cast_weight.matrix, cast_weight.scale, x.dtype, triton)
        y = y.view(*x.shape[:-1], weight.shape[0])
        return (y if bias is None else y + bias.to(y.dtype)), (cast.transposed, cast.transposed_scale)

    def backward(
        self,
        dy: torch.Tensor,
        weight: torch.Tensor,
        saved: Tensors,
        *,
        needs_input: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[torch.Tensor | None, Tensors, torch.Tensor | None]:
        """dy [..., out] -> (dx [..., in], dyᵀ and xᵀ in FP8 with their scales, the bias's gradient)."""
        triton, kind = self._triton(dy), SCALINGS[self.scaling]
        flat = dy.reshape(-1, dy.shape[-1]).contiguous()
        numbers = quantized.gradient_type(kind)
        cast = Cast(*quantized.fp8_cast(flat, kind, numbers, needs_weight, triton))
        dx = None
        if needs_input:
            turned = self._cast_weight(weight, triton)
            dx = self._matmul(
                cast.matrix, cast.scale, turned.transposed, turned.transposed_scale, dy.dtype, triton
            )
            dx = dx.view(*dy.shape[:-1], weight.shape[1])
        operands = (cast.transposed, cast.transposed_scale, *saved) if needs_weight else ()
        return dx, operands, flat.sum(0) if needs_bias else None

    def weight_grad(self, operands: Tensors) -> torch.Tensor:
        """The weight's gradient [out, in], in float32, or bfloat16 where rows are scaled on a GPU."""
        dtype = torch.bfloat16 if self.scaling == "row" and operands[0].is_cuda else torch.float32
        return self._matmul(*operands, dtype, self._triton(operands[0]))

    def write_weight_grad(self, operands: Tensors, out: torch.Tensor, *, fresh: bool) -> None:
        """Write the weight's gradient to `out` [out, in], or add it."""
        if fresh and self._writes(operands, out):
            lhs, lhs_scale, rhs, rhs_scale = operands
            torch._scaled_mm(
                lhs, rhs.t(), scale_a=lhs_scale, scale_b=rhs_scale.t(), out_dtype=out.dtype,
                use_fast_accum=self.fast_accumulate, out=out,
            )  # fmt: skip
            return
        grad = self.weight_grad(operands)
        out.copy_(grad) if fresh else out.add_(grad)

    def _writes(self, operands: Tensors, out: torch.Tensor) -> bool:
        """Whether cuBLAS can write the product to `out` itself."""
        on_gpu = operands[0].is_cuda and self._triton(operands[0])
        return on_gpu and self.scaling == "tensor" and out.is_contiguous() and operands[0].shape[1] > 0

    def _triton(self, x: torch.Tensor) -> bool:
        return choose(self.backend, x.device) == "triton"

    def _cast_input(self, x: torch.Tensor, *, keep: bool, triton: bool) -> Cast:
        kind = SCALINGS[self.scaling]

        def make() -> Cast:
            flat = x.reshape(-1, x.shape[-1]).contiguous()
            return Cast(*quantized.fp8_cast(flat, kind, quantized.NUMBERS, keep, triton))

        return (
            make() if torch.compiler.is_compiling() else self.input_cache.get(x, (kind, keep, triton), make)
        )

    def _cast_weight(self, weight: torch.Tensor, triton: bool) -> Cast:
        kind = SCALINGS[self.scaling]
        if self.weight_cache is None or torch.compiler.is_compiling():
            return cast_weight(weight, kind, triton)
        return self.weight_cache.get(weight, kind, triton)

    def _matmul(
        self,
        a: torch.Tensor,
        a_scale: torch.Tensor,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        dtype: torch.dtype,
        triton: bool,
    ) -> torch.Tensor:
        return quantized.fp8_matmul(
            a, a_scale, b, b_scale, dtype=dtype, scaling=SCALINGS[self.scaling], triton=triton,
            fast=self.fast_accumulate,
        )  # fmt: skip
