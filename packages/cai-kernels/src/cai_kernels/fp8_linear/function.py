"""Public entry point: checks arguments, chooses the backend, keeps the cast of the weight between calls."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import nn

from cai_kernels.backend import Backend, choose
from cai_kernels.fp8_linear import quantized
from cai_kernels.fp8_linear.checks import SCALINGS, Scaling, check, check_device
from cai_kernels.fp8_linear.products import Fp8Products, InputCache
from cai_kernels.fp8_linear.weight_cache import WeightCache, cast_weight


class Fp8Options(TypedDict, total=False):
    """Options of `Fp8Linear` after those of `nn.Linear`."""

    scaling: Scaling
    fast_accumulate: bool
    backend: Backend
    input_cache: InputCache | None
    cache_weight: bool


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scaling: Scaling = "tensor",
    weight_cache: WeightCache | None = None,
    fast_accumulate: bool = True,
    backend: Backend = "auto",
) -> torch.Tensor:
    """`F.linear` with its three matrix products, forward and both gradients, in FP8 (Micikevicius et al., 2209.05433).

    Scales are computed from the current values, not from those of an earlier step. x and weight are cast to e4m3,
    gradients to e5m2 (scaling "tensor") or e4m3. Backward keeps xᵀ in FP8, half the bytes of a bfloat16 x. Under
    autocast, x is cast to its dtype first.

    Args:
        x: the input [..., in], float32, bfloat16 or float16.
        weight: [out, in], float32, bfloat16 or float16; both dims multiples of 16.
        bias: [out] or None.
        scaling: "tensor" (one scale in all), "row" (one a row of each operand of each product) or "block" (1x128 of x
            and gradients, 128x128 of the weight, as DeepSeek-V3, arXiv:2412.19437).
        weight_cache: a `WeightCache` of this weight, for calls between which it may not have changed.
        fast_accumulate: lets Hopper's tensor cores sum with fewer bits; "block" sums blocks in float32 anyhow.
        backend: "auto" and "triton" (FP8 on CUDA from compute capability 8.9), "reference" (the same casts, products
            emulated in float32; "auto" runs it on a CPU).

    Returns [..., out] in the dtype of x. Differentiable once, in x, weight and bias; one graph under torch.compile.
    Raises `KernelError` naming the argument that does not fit, or a GPU without FP8.
    """
    triton = choose(backend, x.device) == "triton"
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    check(x, weight, bias, scaling)
    if backend != "reference":
        check_device(x.device)
    kind = SCALINGS[scaling]
    if weight_cache is None or torch.compiler.is_compiling():
        cast = cast_weight(weight, kind, triton)
    else:
        cast = weight_cache.get(weight, kind, triton)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    y, _, _ = quantized.fp8_linear(
        flat,
        weight,
        None if bias is None else bias.to(x.dtype),
        *cast,
        scaling=kind,
        triton=triton,
        fast=fast_accumulate,
        keep_x=weight.requires_grad and torch.is_grad_enabled(),
    )
    return y.view(*x.shape[:-1], weight.shape[0])


class Fp8Linear(nn.Linear):
    """`nn.Linear` through `fp8_linear`: the same parameters under the same names, and a cache of the weight's cast.

    Where something else runs the layer's products (it is cut over ranks, or its gradient is written into a buffer), it
    finds them in `linear_products` and puts a method `run_products(products, input)` on the module.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`; features are multiples of 16.
        scaling, fast_accumulate, backend: as in `fp8_linear`.
        input_cache: shared with layers that read the same input.
        cache_weight: keep the weight's cast between uses, 2 bytes an element.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scaling: Scaling = "tensor",
        fast_accumulate: bool = True,
        backend: Backend = "auto",
        input_cache: InputCache | None = None,
        cache_weight: bool = True,
    ):
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        weights, inputs = WeightCache() if cache_weight else None, input_cache or InputCache()
        self.linear_products = Fp8Products(scaling, fast_accumulate, backend, weights, inputs)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Unpack[Fp8Options]) -> Fp8Linear:
        """A layer that shares the parameters of `linear`; options as in the constructor."""
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features]."""
        products = self.linear_products
        run = self.__dict__.get("run_products")
        if run is not None:
            return run(products, input)
        return fp8_linear(
            input,
            self.weight,
            self.bias,
            scaling=products.scaling,
            weight_cache=products.weight_cache,
            fast_accumulate=products.fast_accumulate,
            backend=products.backend,
        )

    def extra_repr(self) -> str:
        """The options that `print` shows of it."""
        return f"{super().extra_repr()}, scaling={self.linear_products.scaling}"
