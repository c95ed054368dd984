"""Attention in parts, for code that merges them itself: a part with its log-sum-exp, the merge, and the backward.

Ring attention (Liu et al., arXiv:2310.01889) computes a part for every block of keys it receives, merges the parts in
float32, and in backward asks each part for its gradients under the log-sum-exp of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cai_kernels.attention import reference
from cai_kernels.attention.boundaries import check_starts, last_queries_mask, packed_starts
from cai_kernels.attention.choice import Question, why_not_flash, why_not_ours
from cai_kernels.attention.function import _check
from cai_kernels.backend import Backend, capability, choose
from cai_kernels.errors import KernelError

aten = torch.ops.aten


def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    query_cu_seqlens: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, N, Sq, Hv], log-sum-exp [B, N, Sq]): one part of an attention, outside autograd.

    `attention_backward` differentiates it.

    Args:
        q: [B, N, Sq, H], float32, bfloat16, float16 or float64 (not on CUDA).
        k: [B, Nkv, Sk, H], with N a multiple of Nkv, in q's dtype.
        v: [B, Nkv, Sk, Hv], where Hv is H or less, which is filled up with zeros.
        causal: a query sees keys up to its own position; Sq = Sk, or there are documents.
        scale: factor on q @ k.T; None: 1 / sqrt(H).
        window, softcap: as in `attention`.
        cu_seqlens, query_cu_seqlens: documents, as in `document_attention`; one may have queries and no keys.
        backend: "auto" (torch's cuDNN operator from Hopper on, its flash operator, or Triton, the first that takes
            the arguments; torch's CPU operator), "triton" or "reference". Triton for windows, soft caps and documents.

    The log-sum-exp is natural and float32 (float64 with float64 inputs); of a query that sees no key out is zero and it
    is -inf. Raises `KernelError` naming the argument that does not fit, and where autograd would have to record the
    call.
    """
    shape = _shape(q, k, v, causal, scale, window, softcap, cu_seqlens, query_cu_seqlens)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise KernelError(
            "attention_with_lse is not recorded by autograd",
            fix="call it in the forward of an autograd.Function with attention_backward, or use attention",
        )
    width, v = v.shape[-1], _filled(v, q)
    out, lse = _part(shape, q, k, v, backend)
    return out[..., :width], lse


def _filled(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return values, or what is made of them, with zeros behind up to the features of queries."""
    missing = query.shape[-1] - tensor.shape[-1]
    if missing < 0:
        raise KernelError(
            "values have more features than queries",
            got=tensor.shape[-1],
            expected=f"up to {query.shape[-1]}",
        )
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _part(
    shape: _Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    causal, softcap = shape.causal, shape.softcap
    form = _form(query, key, value, backend, plain=shape.plain)
    scale = shape.scale
    if form == "reference":
        options = {"scale": scale, "softcap": softcap}
        return reference.attention(query, key, value, mask=_visible(shape, query, key), **options)
    if form == "triton":
        return _in_triton(shape, query, key, value)
    if form == "cudnn":
        out, lse = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )[:2]
        return out, lse.view(query.shape[:-1])
    if form == "flash":
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
    key, value = (_expand(t, query.shape[1]) for t in (key, value))
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    query_cu_seqlens: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from one part of an attention.

    With `out` and `lse` of the whole attention and the keys of one part, the gradients of k and v are complete and
    that of q is the part's share: the shares of all parts add up.

    Args:
        dout, out: [B, N, Sq, Hv], in q's dtype: the gradient and the value of the (whole) attention.
        lse: [B, N, Sq], float32 (float64 with float64 inputs): the log-sum-exp of the (whole) attention.
        q, k, v and the others: as in `attention_with_lse`.

    Returns gradients like q, k and v. Raises `KernelError` naming the argument that does not fit.
    """
    shape = _shape(q, k, v, causal, scale, window, softcap, cu_seqlens, query_cu_seqlens)
    shape_of_out = (*q.shape[:-1], v.shape[-1])
    for name, tensor, sizes in (
        ("dout", dout, shape_of_out),
        ("out", out, shape_of_out),
        ("lse", lse, q.shape[:-1]),
    ):
        if tensor.shape != sizes or tensor.device != q.device:
            raise KernelError(f"{name} does not fit q", got=tuple(tensor.shape), expected=tuple(sizes))
    width, filled = v.shape[-1], (_filled(tensor, q) for tensor in (dout, v, out))
    dout, v, out = filled
    dq, dk, dv = _part_backward(shape, dout, q, k, v, out, lse.contiguous(), backend)
    return dq, dk, dv[..., :width]


def _part_backward(
    shape: _Shape,
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale, causal = shape.scale, shape.causal
    form = _form(query, key, value, backend, plain=shape.plain)
    if form == "reference":
        return _reference_backward(shape, dout, query, key, value, out, lse)
    if form == "triton":
        return _in_triton_backward(shape, dout, query, key, value, out, lse)
    lengths = (query.shape[2], key.shape[2], 0.0, causal)
    if form in ("cudnn", "flash"):
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # read only with dropout
        offset = torch.zeros((), dtype=torch.uint64, device=query.device)
        if form == "flash":
            return aten._scaled_dot_product_flash_attention_backward(
                dout, query, key, value, out, lse, None, None, *lengths, seed, offset, scale=scale
            )
        seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout,
            query,
            key,
            value,
            out,
            lse[..., None],
            seed,
            offset,
            None,
            None,
            None,
            *lengths,
            scale=scale,
        )
    wide = [_expand(t, query.shape[1]) for t in (key, value)]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, query, *wide, out, lse, 0.0, causal, scale=scale
    )
    return dq, _gather(dk, key.shape[1]), _gather(dv, value.shape[1])


@dataclass(frozen=True)
class _Shape:
    """What a part's scores are, beside queries and keys; see `attention_with_lse`."""

    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    key_starts: torch.Tensor | None
    query_starts: torch.Tensor | None

    @property
    def plain(self) -> bool:
        """Whether torch's operators take it."""
        return self.window is None and self.softcap is None and self.key_starts is None

    def options(self, query: torch.Tensor, key: torch.Tensor) -> Any:
        """Return the arguments of the Triton operators."""
        from cai_kernels.attention import triton

        lengths = (0, 0) if self.key_starts is None else (query.shape[2], key.shape[2])
        return triton.Options(self.scale, self.causal, self.window or 0, self.softcap or 0.0, *lengths)


def _shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    cu_seqlens: torch.Tensor | None,
    query_cu_seqlens: torch.Tensor | None,
) -> _Shape:
    """Return checked arguments."""
    if cu_seqlens is None:
        _check(query, key, value, Question(causal=causal, window=window, softcap=softcap))
        query_cu_seqlens = None
    else:
        _check(query, key, value, Question(softcap=softcap))
        check_starts(query, key, cu_seqlens, query_cu_seqlens)
        query_cu_seqlens = cu_seqlens if query_cu_seqlens is None else query_cu_seqlens
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _Shape(causal, scale, window, softcap, cu_seqlens, query_cu_seqlens)


def _visible(shape: _Shape, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return who sees whom, bool, broadcastable to [B, 1, Sq, Sk]; None: all do."""
    lengths, options = (query.shape[2], key.shape[2]), {"causal": shape.causal, "window": shape.window}
    if shape.key_starts is None or shape.query_starts is None:
        return reference.visible(*lengths, **options, device=query.device)
    return last_queries_mask(shape.query_starts, shape.key_starts, *lengths, **options)


def _packed_operands(shape: _Shape, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return tensors [B, N, S, H] as the Triton operators take them, and their boundaries."""
    if shape.key_starts is None or shape.query_starts is None:
        return list(tensors), {"query_starts": None, "key_starts": None}
    lengths = tensors[0].shape[2], tensors[1].shape[2]
    packed = [
        packed_starts(starts, n)
        for starts, n in zip((shape.query_starts, shape.key_starts), lengths, strict=True)
    ]
    flat = [tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1) for tensor in tensors]
    return flat, dict(zip(("query_starts", "key_starts"), packed, strict=True))


def _of_rows(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return [N, B S, ...] as [B, N, S, ...], as `like` has it."""
    return (
        flat
        if flat.dim() == like.dim()
        else flat.unflatten(1, (like.shape[0], like.shape[2])).transpose(0, 1)
    )


def _in_triton(
    shape: _Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from cai_kernels.attention import triton

    flat, starts = _packed_operands(shape, query, key, value)
    out, lse = triton.attention(*flat, shape.options(query, key), **starts)
    return _of_rows(out, query), _of_rows(lse, query[..., 0])


def _in_triton_backward(
    shape: _Shape,
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from cai_kernels.attention import triton

    (*flat, dout, out), starts = _packed_operands(shape, query, key, value, dout, out)
    if lse.dim() == out.dim():  # rows of documents are one behind the other
        lse = lse.transpose(0, 1).flatten(1).contiguous()
    needed = triton.Needed(q=True, k=True, v=True)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    inputs = triton.Operands(*flat, bias=None, mask=None, gate=None, **starts)
    gradients = triton.attention_backward(
        dout, None, out, lse, *inputs, **shape.options(query, key).arguments(), **needed.arguments()
    )[:3]
    dq, dk, dv = (_of_rows(grad, like) for grad, like in zip(gradients, (query, key, value), strict=True))
    return dq, dk, dv


def merge_attention(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two sets of keys, from the attention over each.

    Args:
        out_a, out_b: [..., Sq, H], any floating dtypes.
        lse_a, lse_b: [..., Sq]; -inf where a set held no key for the query.
        dtype: dtype of the result's out; None: that of its lse, so that many merges lose nothing.
        backend: "auto" (Triton on CUDA where autograd records nothing and no input is float64, else the reference),
            "triton" or "reference".

    Returns (out, lse), computed in float32 (float64 if an input is), in which lse stays; out is zero and lse -inf where
    neither set held a key. The reference is differentiable in all four. Raises `KernelError` naming the argument that
    does not fit.
    """
    for name, out, lse in (("lse_a", out_a, lse_a), ("lse_b", out_b, lse_b)):
        if lse.shape != out.shape[:-1] or out.shape != out_a.shape:
            raise KernelError(
                f"{name} does not fit its out", got=tuple(lse.shape), expected=tuple(out_a.shape[:-1])
            )
    every = (out_a, lse_a, out_b, lse_b)
    wide = torch.float32
    for tensor in every:
        wide = torch.promote_types(wide, tensor.dtype)
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in every)
    plain = backend == "auto" and (recorded or wide == torch.float64)
    if not plain and choose(backend, out_a.device) == "triton":
        if recorded or wide == torch.float64:
            raise KernelError(
                "the kernel that merges attention takes no float64 and is not recorded by autograd",
                got="gradients are recorded" if recorded else "float64",
                fix='backend="auto" or "reference"',
            )
        return _merge_in_triton(out_a, lse_a, out_b, lse_b, dtype or wide)
    weights, lse = reference.softmax_lse(torch.stack((lse_a.to(wide), lse_b.to(wide)), -1))
    out = out_a.to(wide) * weights[..., :1] + out_b.to(wide) * weights[..., 1:]
    return out.to(dtype or wide), lse


def _merge_in_triton(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    from cai_kernels.attention import merging

    outs = [t if t.stride(-1) == 1 else t.contiguous() for t in (out_a, out_b)]
    if out_a.dim() == 4:
        return merging.merge_attention(outs[0], lse_a, outs[1], lse_b, dtype)
    rows = [t.reshape(1, 1, -1, t.shape[-1]) for t in outs]
    sums = [t.reshape(1, 1, -1) for t in (lse_a, lse_b)]
    out, lse = merging.merge_attention(rows[0], sums[0], rows[1], sums[1], dtype)
    return out.view(out_a.shape), lse.view(lse_a.shape)


def _form(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: Backend, plain: bool = True) -> str:
    form = choose(backend, q.device)
    if form == "triton":
        fits = plain and v.shape == k.shape and q.numel() and k.numel()
        if backend == "auto" and fits and why_not_flash(q) is None:
            return "flash" if _why_not_cudnn(q, k) else "cudnn"
        if (reason := why_not_ours(q, v, Question())) is not None:
            raise KernelError("no attention here gives a log-sum-exp for these arguments", got=reason)
        return "triton"
    takes = plain and q.device.type == "cpu" and v.shape == k.shape and q.numel() and k.numel()
    return "cpu" if backend == "auto" and takes else "reference"


def _why_not_cudnn(q: torch.Tensor, k: torch.Tensor) -> str | None:
    """The reason not to take torch's cuDNN operator where its flash operator takes the arguments, or None."""
    if capability(q.device) < (9, 0):
        return "flash is faster before Hopper"
    if q.shape[-1] > 128:
        return f"head dim {q.shape[-1]}; cuDNN takes up to 128"
    if k.shape[2] == 1 or max(q.shape[:2]) > 65535:
        return "one key, or more sequences or heads than cuDNN counts"
    if torch.are_deterministic_algorithms_enabled():
        return "its gradients are not deterministic"
    return None


def _expand(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    group = heads // tensor.shape[1]
    return tensor if group == 1 else tensor.repeat_interleave(group, 1)


def _gather(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Sum over the query heads that share a key head."""
    if gradient.shape[1] == heads:
        return gradient
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.unflatten(1, (heads, -1)).to(wide).sum(2).to(gradient.dtype)


def _reference_backward(
    shape: _Shape,
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype, heads, key_heads = query.dtype, query.shape[1], key.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    visible_mask = _visible(shape, query, key)
    query, key, value = (_expand(t.to(wide), heads) for t in (query, key, value))
    scores = query @ key.transpose(-1, -2) * shape.scale
    slope = 1.0
    if shape.softcap is not None:
        bent = torch.tanh(scores / shape.softcap)
        scores, slope = shape.softcap * bent, 1 - bent.square()
    if visible_mask is not None:
        scores = scores.masked_fill(~visible_mask, -torch.inf)
    p = torch.exp(scores - torch.where(lse == -torch.inf, torch.inf, lse)[..., None])
    dout = dout.to(wide)
    ds = (
        p
        * (dout @ value.transpose(-1, -2) - (dout * out.to(wide)).sum(-1, keepdim=True))
        * slope
        * shape.scale
    )
    dk, dv = (
        _gather(g, key_heads).to(dtype) for g in (ds.transpose(-1, -2) @ query, p.transpose(-1, -2) @ dout)
    )
    return (ds @ key).to(dtype), dk, dv
