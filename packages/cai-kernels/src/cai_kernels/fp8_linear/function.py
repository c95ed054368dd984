"""Public entry point: checks arguments, chooses the backend, keeps the cast of the weight between calls."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from cai_kernels.backend import Backend, capability, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.fp8_linear import quantized
from cai_kernels.fp8_linear.reference import BLOCK, ROW, TENSOR, Cast

Scaling = Literal["tensor", "row", "block"]
SCALINGS = {"tensor": TENSOR, "row": ROW, "block": BLOCK}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _OptimizerSteps:
    """The number of steps of all optimizers in this process."""

    count = 0


@functools.cache
def _count_optimizer_steps() -> None:
    """Start counting; only the first call has an effect."""

    def stepped(*_: object) -> None:
        _OptimizerSteps.count += 1

    register_optimizer_step_post_hook(stepped)


class WeightCache:
    """The FP8 cast of one weight, for the micro-batches of a step.

    The cast is computed again after a step of any optimizer, and when the weight has changed in place or has other
    memory. torch does not notice when a gather of sharded weights changes values: after loading values into a sharded
    model, call `clear`. Copies of a cache start empty. A compiled graph does not use it.
    """

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Forget the cast."""
        self._key: tuple[object, ...] | None = None
        self._cast: Cast | None = None

    def __deepcopy__(self, memo: dict) -> WeightCache:
        return WeightCache()

    def __reduce__(self):
        return WeightCache, ()

    def get(self, weight: torch.Tensor, scaling: int, triton: bool) -> Cast:
        """The cast of weight [out, in], and transposed."""
        _count_optimizer_steps()
        here = (weight.data_ptr(), weight._version, weight.shape, weight.dtype, weight.device)
        key = (_OptimizerSteps.count, *here, scaling, triton)
        if self._cast is None or key != self._key:
            self._cast = _cast_weight(weight, scaling, triton)
            self._key = key
        return self._cast


def _cast_weight(weight: torch.Tensor, scaling: int, triton: bool) -> Cast:
    return Cast(
        *quantized.fp8_cast(
            weight.detach().contiguous(),
            quantized.weight_scaling(scaling),
            quantized.NUMBERS,
            transposed=True,
            triton=triton,
        )
    )


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: str) -> None:
    if scaling not in SCALINGS:
        raise KernelError("unknown scaling", got=repr(scaling), expected="'tensor', 'row' or 'block'")
    require("x", x, dtypes=DTYPES)
    require("weight", weight, dtypes=DTYPES, like=x)
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise KernelError(
            "weight does not fit x",
            got=f"weight {tuple(weight.shape)}, x {tuple(x.shape)}",
            expected="x [..., in] and weight [out, in]",
        )
    if 0 in weight.shape or weight.shape[0] % 16 or weight.shape[1] % 16:
        raise KernelError(
            "weight has dims that FP8 products cannot take",
            got=tuple(weight.shape),
            expected="multiples of 16",
            fix="leave this layer in bfloat16",
        )
    if bias is not None:
        require("bias", bias, dtypes=DTYPES, like=x)
        if bias.shape != weight.shape[:1]:
            raise KernelError(
                "bias does not fit weight", got=tuple(bias.shape), expected=f"({weight.shape[0]},)"
            )


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and capability(device) < (8, 9):
        raise KernelError(
            "this GPU has no FP8 products",
            got="compute capability " + ".".join(map(str, capability(device))),
            expected="8.9 or higher (Ada, Hopper)",
            fix='use torch.nn.functional.linear, or backend="reference" to emulate',
        )


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
        x: [..., in], float32, bfloat16 or float16.
        weight: [out, in], float32, bfloat16 or float16; both dims multiples of 16.
        bias: [out] or None.
        scaling: "tensor" (one scale in all), "row" (one a row of each operand of each product) or "block" (1x128 of x
            and gradients, 128x128 of the weight, as DeepSeek-V3, arXiv:2412.19437).
        weight_cache: a `WeightCache` of this weight, for calls between which it may not have changed.
        fast_accumulate: lets Hopper's tensor cores sum with fewer bits; "block" sums blocks in float32 anyhow.
        backend: "auto" and "triton" (FP8 on CUDA from compute capability 8.9), "reference" (the same casts, products
            emulated in float32: what "auto" runs on a CPU).

    Returns [..., out] in the dtype of x. Differentiable once, in x, weight and bias; one graph under torch.compile.
    Raises `KernelError` naming the argument that does not fit, or a GPU without FP8.
    """
    triton = choose(backend, x.device) == "triton"
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    _check(x, weight, bias, scaling)
    if backend != "reference":
        _check_device(x.device)
    kind = SCALINGS[scaling]
    if weight_cache is None or torch.compiler.is_compiling():
        cast = _cast_weight(weight, kind, triton)
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

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`; features are multiples of 16.
        scaling, fast_accumulate, backend: as in `fp8_linear`.
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
    ):
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.scaling, self.fast_accumulate, self.backend = scaling, fast_accumulate, backend
        self.weight_cache = WeightCache()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        scaling: Scaling = "tensor",
        fast_accumulate: bool = True,
        backend: Backend = "auto",
    ) -> Fp8Linear:
        """A layer that shares the parameters of `linear`."""
        options = {"scaling": scaling, "fast_accumulate": fast_accumulate, "backend": backend}
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features]."""
        return fp8_linear(
            input,
            self.weight,
            self.bias,
            scaling=self.scaling,
            weight_cache=self.weight_cache,
            fast_accumulate=self.fast_accumulate,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """The options, for `print`."""
        return f"{super().extra_repr()}, scaling={self.scaling}"
