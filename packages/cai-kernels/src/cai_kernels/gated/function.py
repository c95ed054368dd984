"""Public entry points: argument checks and the choice of the backend."""

from __future__ import annotations

from typing import Literal

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.gated import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, backend: Backend = "auto") -> torch.Tensor:
    """`silu(gate) * up` (Shazeer, arXiv:2002.05202), LLaMA's gated activation.

    Args:
        gate: [..., F], float32, bfloat16 or float16 (the reference takes float64 too). Neighbouring columns and any
            stride between rows are read where they lie; other strides are copied.
        up: like gate, of its shape, dtype and device. None: gate is packed, [..., 2F], gate half first.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [..., F] in gate's dtype, computed in float32. Differentiable; only the inputs are kept for backward, and
    a packed input has one packed gradient. One graph under torch.compile. Raises `KernelError` naming the argument.
    """
    return _gated("gate", gate, "up", up, "silu", backend)


def geglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    approximate: Literal["tanh", "none"] = "tanh",
    backend: Backend = "auto",
) -> torch.Tensor:
    """`gelu(gate) * up` (Shazeer, arXiv:2002.05202), Gemma's gated activation. Arguments and result as in `swiglu`.

    `approximate` chooses GELU's tanh form or, with "none", the one with erf, as in `torch.nn.functional.gelu`.
    """
    if approximate not in ("tanh", "none"):
        raise KernelError("unknown approximate", got=repr(approximate), expected="'tanh' or 'none'")
    return _gated("gate", gate, "up", up, "gelu_tanh" if approximate == "tanh" else "gelu", backend)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, *, backend: Backend = "auto") -> torch.Tensor:
    """`x * sigmoid(gate)`, the output gate of AlphaFold's attention (Jumper et al., 2021, supplement 1.6).

    x, gate [..., F] of one shape, dtype and device, strides as in `swiglu`. Returns [..., F]. Differentiable in both.
    """
    return _gated("gate", gate, "x", x, "sigmoid", backend)


def _gated(
    first: str, gate: torch.Tensor, second: str, up: torch.Tensor | None, kind: str, backend: Backend
) -> torch.Tensor:
    form = choose(backend, gate.device)
    require(first, gate, dtypes=_DTYPES if form == "triton" else (*_DTYPES, torch.float64))
    if gate.dim() == 0:
        raise KernelError(f"{first} has no columns", got="a tensor of 0 dims", expected="[..., F]")
    if up is None:
        if gate.shape[-1] % 2:
            raise KernelError(
                f"a packed {first} has an odd last dim",
                got=tuple(gate.shape),
                expected="[..., 2F]",
                fix=f"pass {second} as well if {first} is not packed",
            )
    else:
        require(second, up, dtypes=(gate.dtype,), like=gate)
        if up.shape != gate.shape:
            raise KernelError(
                f"{second} does not fit {first}", got=tuple(up.shape), expected=tuple(gate.shape)
            )
    if form == "reference":
        return reference.gated(gate, up, kind)
    from cai_kernels.gated import triton

    return triton.gated(gate, up, kind)
