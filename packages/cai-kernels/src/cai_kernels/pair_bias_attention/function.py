"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.pair_bias_attention import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ANY = (*_DTYPES, torch.float64)


def pair_bias_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pair_bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`sigmoid(gate) * softmax(scale * q @ k.T + pair_bias + mask) @ v`, as AlphaFold's row and triangle attention.

    Neither scores nor their gradients reach memory (Dao, arXiv:2307.08691). The pair bias is shared by the R rows of
    a batch entry and its gradient is their sum, in float32 and in a fixed order. In backward the gate's and the
    softmax's gradients come from the gated output, so nothing else is kept than it and the log-sum-exp.

    Args:
        q, k, v: [B, R, N, S, H], any strides; float32, bfloat16 or float16 (the reference takes float64 too). H up to
            256 in Triton.
        pair_bias: [B, N, S, S], any of these dtypes.
        mask: [B, R, S], added to the scores of a key (0 or a large negative number, or -inf). Takes no gradient.
        gate: [B, R, N, S, H] before its sigmoid, in q's dtype.
        scale: factor on q @ k.T; None: 1 / sqrt(H).
        return_lse: also give the log-sum-exp of the scores, [B, R, N, S] in float32, differentiable.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [B, R, N, S, H] in q's dtype, or that and the log-sum-exp. Differentiable in q, k, v, pair_bias and gate.
    A query whose keys are all masked by -inf gives zeros. Raises `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, q.device)
    require("q", q, dtypes=_DTYPES if form == "triton" else _ANY)
    _check(q, k, v, pair_bias, mask, gate)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if form == "reference":
        out, lse = reference.pair_bias_attention(q, k, v, pair_bias, mask, gate, scale)
        return (out, lse) if return_lse else out
    from cai_kernels.attention import triton

    if q.shape[-1] > triton.MAX_HEAD_DIM:
        raise KernelError(
            "head dim is too large for Triton", got=q.shape[-1], expected=f"up to {triton.MAX_HEAD_DIM}"
        )
    flat_mask, flat_gate = (None if t is None else t.flatten(0, 1) for t in (mask, gate))
    flat = (t.flatten(0, 1) for t in (q, k, v))
    out, lse = triton.attention(*flat, triton.Options(scale), bias=pair_bias, mask=flat_mask, gate=flat_gate)
    out = out.unflatten(0, q.shape[:2])
    return (out, lse.unflatten(0, q.shape[:2])) if return_lse else out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pair_bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    gate: torch.Tensor | None,
) -> None:
    if q.dim() != 5:
        raise KernelError("q has a wrong shape", got=tuple(q.shape), expected="[B, R, N, S, H]")
    batch, rows, heads, length, _ = q.shape
    for name, tensor, shape in (
        ("k", k, q.shape),
        ("v", v, q.shape),
        ("pair_bias", pair_bias, (batch, heads, length, length)),
        ("mask", mask, (batch, rows, length)),
        ("gate", gate, q.shape),
    ):
        if tensor is None:
            continue
        require(name, tensor, dtypes=_ANY if name in ("pair_bias", "mask") else (q.dtype,), like=q)
        if tensor.shape != shape:
            raise KernelError(
                f"{name} does not fit q", got=tuple(tensor.shape), expected=tuple(shape), fix="expand it"
            )
    if mask is not None and mask.requires_grad:
        raise KernelError("mask takes no gradient", fix="detach it, or add what is learned to pair_bias")
