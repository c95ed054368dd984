"""The kinds of quantized weights, and which layers they fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from cai_kernels.errors import KernelError

QuantizedKind = Literal["nf4", "int8"]
KINDS = get_args(QuantizedKind)
BLOCK = 64  # inputs that share a scale of nf4


@dataclass(frozen=True)
class Shapes:
    """Shapes and dtype of what is stored of a weight [out, in].

    Args:
        codes: uint8 [out, in / 2] (nf4, two codes a byte) or int8 [out, in].
        scales: float32 [out, in / 64] (nf4) or [out, 1] (int8).
        dtype: the dtype of the codes.
    """

    codes: tuple[int, int]
    scales: tuple[int, int]
    dtype: torch.dtype


def check_kind(kind: str) -> None:
    """Raise `KernelError` for a kind that is none."""
    if kind not in KINDS:
        raise KernelError("unknown kind", got=repr(kind), expected="'nf4' or 'int8'")


def kind_fits(in_features: int, out_features: int, kind: QuantizedKind) -> bool:
    """Return whether a weight [out_features, in_features] can be stored in a kind; `KernelError` for an unknown one."""
    check_kind(kind)
    return _fits(in_features, out_features, kind)


def _fits(in_features: int, out_features: int, kind: str) -> bool:
    return in_features > 0 and out_features > 0 and (kind == "int8" or in_features % BLOCK == 0)


def check_features(in_features: int, out_features: int, kind: str, layer: str = "") -> None:
    """Raise `KernelError` for a weight that cannot be stored in a kind; `layer` is its name, for the message."""
    check_kind(kind)
    if _fits(in_features, out_features, kind):
        return
    blocks = "inputs that are a multiple of 64, which share a scale; at least one output"
    raise KernelError(
        f"the weight{f' of {layer!r}' if layer else ''} cannot be stored in {kind}",
        got=f"{in_features} inputs and {out_features} outputs",
        expected=blocks if kind == "nf4" else "at least one input and one output",
        fix='leave this layer as it is, or store it in "int8"'
        if kind == "nf4"
        else "leave this layer as it is",
    )


def shapes_of(in_features: int, out_features: int, kind: str) -> Shapes:
    """Return the shapes of what is stored of a weight that fits."""
    if kind == "nf4":
        return Shapes((out_features, in_features // 2), (out_features, in_features // BLOCK), torch.uint8)
    return Shapes((out_features, in_features), (out_features, 1), torch.int8)


def features_of(codes: torch.Tensor, kind: str) -> tuple[int, int]:
    """Return the inputs and outputs of a weight from its codes [out, ...]."""
    return codes.shape[1] * (2 if kind == "nf4" else 1), codes.shape[0]
