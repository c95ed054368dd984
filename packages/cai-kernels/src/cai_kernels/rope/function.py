"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.rope import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys (Su et al., arXiv:2104.09864), in one launch.

    Args:
        q, k: [B, N, S, H] and [B, K, S, H], float32, bfloat16 or float16 (the reference takes float64 too). Any
            strides with neighbouring values of a head are read where they lie, as a transposed [B, S, N, H] is.
        cos, sin: [S, W] or [B or 1, S, W], in any of these dtypes. W is half the rotary dim, one value a pair, or all
            of it as Hugging Face makes it: both values of a pair are the same, and one of them is read.
        position_ids: [S], [1, S] or [B, S] integers. Then cos and sin are tables [P, W] (or [1, P, W]) and these their
            rows; they are not checked against P on a GPU.
        interleaved: pairs are neighbours (GPT-J, GLM) rather than a half apart (LLaMA). A table of full width then
            repeats each value twice in a row.
        rotary_dim: number of values of a head, the first ones, that are rotated; all H by default. The rest is copied.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns (q, k) rotated: new tensors in the inputs' dtypes, laid out in memory as the inputs are. Computed in
    float32. Differentiable in q and k: backward is the inverse rotation and keeps only cos and sin. Gradients of cos
    and sin are the reference's alone. One graph under torch.compile. Raises `KernelError` naming the argument that does
    not fit.
    """
    form = choose(backend, q.device)
    dtypes = _DTYPES if form == "triton" else (*_DTYPES, torch.float64)
    require("q", q, dtypes=dtypes)
    require("k", k, dtypes=dtypes, like=q)
    rotary_dim = _check_heads(q, k, rotary_dim)
    _check_tables(q, cos, sin, position_ids, rotary_dim, dtypes)
    if form == "reference":
        return reference.rope(q, k, cos, sin, position_ids, interleaved, rotary_dim)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise KernelError(
            "the Triton rope has no gradient for cos and sin",
            got="tables that require one",
            fix='detach them, or use backend="reference"',
        )
    from cai_kernels.rope import triton

    return triton.rope(q, k, cos, sin, position_ids, rotary_dim, interleaved, False)


def _check_heads(q: torch.Tensor, k: torch.Tensor, rotary_dim: int | None) -> int:
    if q.dim() != 4:
        raise KernelError("q has another number of dims", got=tuple(q.shape), expected="[B, N, S, H]")
    if k.dim() != 4 or (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        b, _, s, h = q.shape
        raise KernelError("k does not fit q", got=tuple(k.shape), expected=f"({b}, K, {s}, {h})")
    size = q.shape[-1] if rotary_dim is None else rotary_dim
    if size % 2 or not 0 < size <= q.shape[-1]:
        raise KernelError("rotary_dim does not fit q", got=size, expected=f"even, 2 to {q.shape[-1]}")
    return size


def _check_tables(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    rotary_dim: int,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    batch, _, length, _ = q.shape
    require("cos", cos, dtypes=dtypes, like=q)
    require("sin", sin, dtypes=(cos.dtype,), like=q)
    if sin.shape != cos.shape:
        raise KernelError("sin does not fit cos", got=tuple(sin.shape), expected=tuple(cos.shape))
    batches = (1,) if position_ids is not None else (1, batch)
    rows_fit = position_ids is not None or (cos.dim() >= 2 and cos.shape[-2] == length)
    widths = (rotary_dim, rotary_dim // 2)
    if not (
        cos.dim() in (2, 3)
        and rows_fit
        and cos.shape[-1] in widths
        and (cos.dim() == 2 or cos.shape[0] in batches)
    ):
        rows = "P" if position_ids is not None else length
        raise KernelError(
            "cos does not fit q",
            got=tuple(cos.shape),
            expected=f"[{rows}, W] or [{' or '.join(map(str, sorted(set(batches))))}, {rows}, W] with W in {widths}",
        )
    if position_ids is None:
        return
    require("position_ids", position_ids, dtypes=(torch.int64, torch.int32), like=q)
    if tuple(position_ids.shape) not in ((length,), (1, length), (batch, length)):
        raise KernelError(
            "position_ids does not fit q",
            got=tuple(position_ids.shape),
            expected=f"({length},), (1, {length}) or ({batch}, {length})",
        )
