"""Public entry points: argument checks and the choice of the backend."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.quantized_linear import operators, reference
from cai_kernels.quantized_linear.kinds import (
    QuantizedKind,
    check_features,
    check_kind,
    features_of,
    shapes_of,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDE = (*_DTYPES, torch.float64)


def quantize(weight: torch.Tensor, kind: QuantizedKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight: `codes, scales` of nf4 (QLoRA, arXiv:2305.14314) or int8.

    Numbers are rounded to the nearest level of their block (nf4) or row (int8), in float32, to the same bits on every
    device; nf4 has the bits of bitsandbytes' `quantize_4bit(blocksize=64, compress_statistics=False)`. Where all is
    zero the scale is 0, and the codes are those of zero. Not differentiable.

    Args:
        weight: [out, in], float32, bfloat16, float16 or float64 (rounded to float32 first), any strides.
        kind: "nf4", with `in` a multiple of 64, or "int8".

    Returns (codes, scales), on the device of weight. nf4: uint8 [out, in / 2], even inputs in the high four bits, and
    float32 [out, in / 64]. int8: int8 [out, in] and float32 [out, 1]. Tensors without values, on the meta device or
    fake, give such. Raises `KernelError` naming the argument that does not fit, or numbers that are not finite: the
    scales are looked at once, at the end, which is the only wait for a GPU.
    """
    check_kind(kind)
    require("weight", weight, dtypes=_WIDE)
    if weight.dim() != 2:
        raise KernelError("weight has another number of dims", got=tuple(weight.shape), expected="[out, in]")
    outputs, inputs = weight.shape
    check_features(inputs, outputs, kind)
    if not has_values(weight):
        return empty(inputs, outputs, kind, weight)
    codes, scales = reference.quantize(weight.detach(), kind)
    if not scales.isfinite().all():
        raise KernelError(
            "weight is not finite",
            got=f"NaN or infinity in row {int((~scales.isfinite()).any(1).nonzero()[0])}",
            expected="finite numbers",
            fix="look for a damaged file, or for training that diverged",
        )
    return codes, scales


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values: not on the meta device, and not fake."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def empty(
    in_features: int, out_features: int, kind: QuantizedKind, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales without values, where `like` is."""
    shapes = shapes_of(in_features, out_features, kind)
    return like.new_empty(shapes.codes, dtype=shapes.dtype), like.new_empty(
        shapes.scales, dtype=torch.float32
    )


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    kind: QuantizedKind,
    dtype: torch.dtype = torch.bfloat16,
    *,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return the weight [out, in] that codes and scales stand for.

    Args:
        codes, scales: as `quantize` returns them.
        kind: the kind that they are of.
        dtype: bfloat16, float16, float32 or float64; the product is made in float32 and rounded once.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    The same bits from every backend. Not differentiable. One graph under torch.compile. Raises `KernelError` naming the
    argument that does not fit.
    """
    if dtype not in _WIDE:
        raise KernelError("unsupported dtype", got=dtype, expected=", ".join(map(str, _WIDE)))
    triton = choose(backend, codes.device) == "triton"
    _check_stored(codes, scales, kind)
    return operators.dequantize_weight(codes, scales, kind, dtype, triton)


def quantized_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    kind: QuantizedKind,
    backend: Backend = "auto",
) -> torch.Tensor:
    """`F.linear` with a weight in 4 or 8 bits (QLoRA, Dettmers et al., arXiv:2305.14314), which does not train.

    The weight is rounded to x's dtype and multiplied there. Under autocast, x is cast to its dtype first, but for
    float64.

    Args:
        x: the input [..., in], float32, bfloat16 or float16, any strides; float64 by the reference only.
        codes, scales: as `quantize` returns them.
        bias: [out] or None, of any of these dtypes; used in x's.
        kind: the kind that codes and scales are of.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [..., out] in x's dtype. Differentiable, any number of times, in x and bias; backward makes the weight from
    its codes again and keeps nothing else. One graph under torch.compile. Raises `KernelError` naming the argument that
    does not fit.
    """
    rows = x
    if torch.is_autocast_enabled(x.device.type) and x.dtype in _DTYPES:
        rows = x.to(torch.get_autocast_dtype(x.device.type))
    form = "reference" if backend == "auto" and x.dtype == torch.float64 else choose(backend, x.device)
    require("x", rows, dtypes=_DTYPES if form == "triton" else _WIDE)
    _check_stored(codes, scales, kind, like=x)
    inputs, outputs = features_of(codes, kind)
    if x.dim() == 0 or x.shape[-1] != inputs:
        raise KernelError("x does not fit codes", got=tuple(x.shape), expected=f"[..., {inputs}]")
    if bias is not None:
        require("bias", bias, dtypes=_WIDE, like=x)
        if bias.shape != (outputs,):
            raise KernelError("bias does not fit codes", got=tuple(bias.shape), expected=f"({outputs},)")
        bias = bias.to(rows.dtype)
    return operators.quantized_linear(rows, codes, scales, bias, kind, form == "triton")


def _check_stored(
    codes: torch.Tensor, scales: torch.Tensor, kind: QuantizedKind, like: torch.Tensor | None = None
) -> None:
    """Raise `KernelError` for codes and scales that are not of a kind, or not on the device of `like`."""
    check_kind(kind)
    require("codes", codes, dtypes=(torch.uint8 if kind == "nf4" else torch.int8,), like=like)
    require("scales", scales, dtypes=(torch.float32,), like=codes)
    if codes.dim() != 2:
        raise KernelError("codes have another number of dims", got=tuple(codes.shape), expected="two")
    inputs, outputs = features_of(codes, kind)
    check_features(inputs, outputs, kind)
    expected = shapes_of(inputs, outputs, kind).scales
    if scales.shape != expected:
        raise KernelError("scales do not fit codes", got=tuple(scales.shape), expected=str(expected))
    if scales.requires_grad:
        raise KernelError("scales do not train", got="requires_grad", fix="detach them")
