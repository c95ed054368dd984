"""Public entry points: argument checks and the choice of the backend."""

from __future__ import annotations

import torch
from torch.nn.attention import sdpa_kernel

from cai_kernels.attention import reference
from cai_kernels.attention.choice import (
    SDPA,
    AttentionBackend,
    AttentionChoice,
    Question,
    decide,
    needs_mask,
    order,
    torchs_choice,
    why_not_flash,
    why_not_ours,
)
from cai_kernels.attention.packed import packed_attention, why_not_packed
from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: AttentionBackend = "auto",
) -> torch.Tensor:
    """`softmax(scale * q @ k.T + mask) @ v` by the fastest form for the arguments; `explain_attention` says which.

    torch's scaled_dot_product_attention is used wherever it can be, with cuDNN before flash from Hopper on. torch's
    flash operator is called with a window, and the Triton kernel of this package takes soft caps and float32 windows.

    Args:
        q: [B, N, Sq, H], float32, bfloat16, float16 or float64, any strides.
        k, v: [B, Nkv, Sk, H], with N a multiple of Nkv, in q's dtype.
        mask: bool (True is seen) or floating (added), broadcastable to [B, N, Sq, Sk].
        causal: a query sees keys up to its own position; Sq = Sk.
        scale: factor on q @ k.T; None: 1 / sqrt(H).
        window: a query sees its own position and window - 1 before it (and as many after it unless causal); Sq = Sk.
        softcap: scores become softcap * tanh(score / softcap), before the mask.
        dropout: probability of dropping a weight; pass 0 in evaluation.
        backend: "auto", or one of `AttentionChoice.backend`; what it cannot take is an error. "auto" takes the
            reference for a soft cap on the CPU, or with a mask, dropout or float64.

    Returns [B, N, Sq, H] in q's dtype. Differentiable in q, k and v (and in a floating mask where the form is
    "efficient", "math" or "reference"). Raises `KernelError` naming the argument that does not fit.
    """
    question = Question(mask, causal, window, softcap, dropout)
    _check(q, k, v, question)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    name = decide(q, v, question).backend if backend == "auto" else _explicit(q, v, question, backend)
    if name == "reference":
        return reference.attention(
            q, k, v, scale=scale, mask=mask, causal=causal, window=window, softcap=softcap, dropout=dropout
        )[0]
    if name == "triton":
        from cai_kernels.attention import triton

        options = triton.Options(scale, causal, window=window or 0, softcap=softcap or 0.0)
        return triton.attention(q, k, v, options)[0]
    if name == "flash_window":
        return _flash_window(q, k, v, question, scale)
    return _torchs(q, k, v, question, scale, name)


def explain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> AttentionChoice:
    """The form that `attention` takes for these arguments with backend="auto", and why; computes nothing."""
    question = Question(mask, causal, window, softcap, dropout)
    _check(q, k, v, question)
    choice = decide(q, v, question)
    if choice.backend != "sdpa":
        return choice
    mask, causal = _folded(q, k, question)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    operator_name = torchs_choice(
        q, k, v, mask, causal=causal, scale=scale, dropout=dropout, backends=order(q.device)
    )
    return AttentionChoice(operator_name or "math", choice.reason)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention within each of many sequences that are packed one after the other.

    Args:
        q: [T, N, H], float32, bfloat16 or float16 (the reference takes float64 too), any strides.
        k, v: [Tk, Nkv, H], with N a multiple of Nkv, in q's dtype.
        cu_seqlens: [B + 1] int32: sequence b of q is rows cu_seqlens[b]..cu_seqlens[b + 1]; the last is T.
        cu_seqlens_k: the same for k and v; by default cu_seqlens.
        max_seqlen: the longest sequence of q and of k, or more; None: T or Tk. An exact value avoids empty programs.
        causal, window: as in `attention`; where lengths differ, the last query is at the position of the last key.
        scale: factor on q @ k.T; None: 1 / sqrt(H).
        backend: "auto" (on CUDA in 16 bits, H a multiple of 8: cuDNN, see `why_not_packed`, or torch's flash up to 256;
            else Triton on CUDA, else the reference), "triton" or "reference".

    Returns [T, N, H] in q's dtype. Differentiable in q, k and v. A query that sees no key gives zeros. The host
    reads no length, except in the reference. Raises `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, q.device)
    starts = (cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
    require("q", q, dtypes=_DTYPES[:3] if form == "triton" else _DTYPES)
    _check_heads(q, k, v, 3)
    for name, tensor in zip(("cu_seqlens", "cu_seqlens_k"), starts, strict=True):
        require(name, tensor, dtypes=(torch.int32,), like=q)
        if tensor.shape != starts[0].shape or tensor.dim() != 1 or not tensor.numel():
            raise KernelError(f"{name} has a wrong shape", got=tuple(tensor.shape), expected="[B + 1]")
    _check_window(window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if form == "reference":
        return reference.varlen_attention(q, k, v, starts, scale=scale, causal=causal, window=window)
    longest = max(q.shape[0], k.shape[0]) if max_seqlen is None else max_seqlen
    if backend == "auto" and why_not_flash(q) is None and q.numel() and k.numel():
        if causal and cu_seqlens_k is None and why_not_packed(q, k, v) is None:
            return packed_attention(q, k, v, cu_seqlens, scale=scale, window=window)
        window_left = (window or 0) - 1
        return torch.ops.aten._flash_attention_forward(
            q, k, v, *starts, longest, longest, 0.0, causal, False,
            scale=scale, window_size_left=window_left, window_size_right=0 if causal else window_left,
        )[0]  # fmt: skip
    from cai_kernels.attention import triton

    if q.shape[-1] > triton.MAX_HEAD_DIM:
        raise KernelError(
            "head dim is too large for Triton", got=q.shape[-1], expected=f"up to {triton.MAX_HEAD_DIM}"
        )
    options = triton.Options(scale, causal, window=window or 0, longest_query=longest, longest_key=longest)
    heads_first = (tensor.transpose(0, 1) for tensor in (q, k, v))
    out, _ = triton.attention(*heads_first, options, query_starts=starts[0], key_starts=starts[1])
    return out.transpose(0, 1)


def _explicit(q: torch.Tensor, v: torch.Tensor, question: Question, backend: str) -> str:
    """The requested backend. Raises `KernelError` if it cannot take the arguments."""
    if backend == "triton":
        reason = why_not_ours(q, v, question)
    elif backend == "flash_window":
        reason = "no window is given" if question.window is None else why_not_flash(q)
        if question.mask is not None or question.softcap is not None or v.shape[-1] != q.shape[-1]:
            reason = "it takes no mask, no soft cap and equal head dims"
    elif backend in SDPA:
        reason = None if question.softcap is None else "torch's operators have no soft cap"
    elif backend == "reference":
        reason = None
    else:
        backend_names = ", ".join(("auto", *SDPA, "flash_window", "triton", "reference"))
        raise KernelError("unknown backend", got=repr(backend), expected=backend_names)
    if reason is not None:
        raise KernelError(f'the "{backend}" attention cannot run here', got=reason, fix='use backend="auto"')
    return backend


def _torchs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, question: Question, scale: float, name: str
) -> torch.Tensor:
    """torch's scaled_dot_product_attention: "sdpa" in our order of operators, or the one that is named."""
    mask, causal = _folded(q, k, question)
    dropout, grouped = question.dropout, q.shape[1] != k.shape[1]
    if name == "sdpa" and q.device.type != "cuda":
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped
        )
    backends = order(q.device) if name == "sdpa" else [SDPA[name]]
    if name != "sdpa" and not torch.compiler.is_compiling():
        operator_name = torchs_choice(
            q, k, v, mask, causal=causal, scale=scale, dropout=dropout, backends=backends
        )
        if operator_name != name:
            raise KernelError(
                f'torch has no "{name}" attention for these arguments', got=_said(q, k, question)
            )
    with sdpa_kernel(backends, set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped
        )


def _flash_window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, question: Question, scale: float
) -> torch.Tensor:
    window_left = (question.window or 1) - 1
    out = torch.ops.aten._flash_attention_forward(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None, q.shape[2], k.shape[2],
        question.dropout, question.causal, False,
        scale=scale, window_size_left=window_left, window_size_right=0 if question.causal else window_left,
    )[0]  # fmt: skip
    return out.transpose(1, 2)


def _folded(q: torch.Tensor, k: torch.Tensor, question: Question) -> tuple[torch.Tensor | None, bool]:
    """(mask, causal) as torch's operators take them."""
    mask, causal = question.mask, question.causal
    if not needs_mask(question):
        return mask, causal
    visible_mask = reference.visible(
        q.shape[2], k.shape[2], causal=causal, window=question.window, device=q.device
    )
    if mask is None or visible_mask is None:
        return visible_mask, False
    return (
        mask & visible_mask if mask.dtype == torch.bool else mask.masked_fill(~visible_mask, -torch.inf)
    ), False


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, question: Question) -> None:
    require("q", q, dtypes=_DTYPES)
    _check_heads(q, k, v, 4)
    _check_window(question.window)
    mask, shape = question.mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask is not None:
        require("mask", mask, dtypes=(torch.bool, *_DTYPES), like=q)
        fits = mask.dim() <= 4 and all(
            have in (1, want) for have, want in zip(mask.shape[::-1], shape[::-1], strict=False)
        )
        if not fits:
            raise KernelError(
                "mask does not fit q and k", got=tuple(mask.shape), expected=f"broadcastable to {shape}"
            )
    if (question.causal or question.window is not None) and q.shape[2] != k.shape[2]:
        raise KernelError(
            "causal and window need as many queries as keys",
            got=f"{q.shape[2]} queries, {k.shape[2]} keys",
            fix="pass a mask, or varlen_attention, where the last query stands at the last key",
        )
    if question.softcap is not None and not question.softcap > 0:
        raise KernelError("softcap must be positive", got=question.softcap)
    if not 0 <= question.dropout < 1:
        raise KernelError("dropout must be in [0, 1)", got=question.dropout)


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise KernelError("window must be positive", got=window, fix="None for no window")


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dims: int) -> None:
    """Check the shapes of k and v against q: [B, N, S, H] with four dims, [T, N, H] with three."""
    for name, tensor in (("k", k), ("v", v)):
        require(name, tensor, dtypes=(q.dtype,), like=q)
    heads, key_heads, value_heads = (tensor.shape[1] if tensor.dim() == dims else 0 for tensor in (q, k, v))
    fits = (
        min(heads, key_heads, value_heads) > 0
        and key_heads == value_heads
        and heads % key_heads == 0
        and k.shape[:-1] == v.shape[:-1]
        and k.shape[-1] == q.shape[-1]
        and (dims == 3 or k.shape[0] == q.shape[0])
    )
    if not fits:
        expected = "q [B, N, Sq, H], k [B, Nkv, Sk, H]" if dims == 4 else "q [T, N, H], k [Tk, Nkv, H]"
        raise KernelError(
            "k and v do not fit q",
            got=f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            expected=f"{expected}, N a multiple of Nkv",
        )


def _said(q: torch.Tensor, k: torch.Tensor, question: Question) -> str:
    mask = "" if question.mask is None else f", mask {question.mask.dtype}"
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype} on {q.device.type}{mask}"
