"""Public entry points: argument checks and the choice of the backend."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.paged_attention import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN_DTYPES = (*_DTYPES, torch.float64)
_WHOLE = (torch.int32, torch.int64)
MAX_HEAD_DIM = 256


def paged_append_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Write new keys and values into a paged cache, in place.

    Args:
        k_cache, v_cache: [blocks, block_size, Nkv, H], contiguous, float32, bfloat16 or float16 (the reference takes
            float64 too). Values may have another H than keys.
        k, v: [T, Nkv, H] as their caches, any strides, cast to the caches' dtypes.
        slots: [T] int32 or int64: block * block_size + position in the block; a negative slot writes nothing. No
            slot twice.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Raises `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, k_cache.device)
    dtypes = _PLAIN_DTYPES if form == "reference" else _DTYPES
    _check_caches(k_cache, v_cache, dtypes)
    require("slots", slots, dtypes=_WHOLE, like=k_cache)
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        require(name, tensor, dtypes=dtypes, like=k_cache)
        if tensor.shape != (slots.numel(), *cache.shape[2:]) or slots.dim() != 1:
            raise KernelError(
                f"{name} does not fit its cache and slots",
                got=f"{tuple(tensor.shape)}, slots {tuple(slots.shape)}",
                expected=f"[T, {cache.shape[2]}, {cache.shape[3]}], slots [T]",
            )
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise KernelError(
                "a paged cache takes no gradient", got=f"{name} requires grad", fix="torch.no_grad()"
            )
    if form == "reference":
        reference.append(k_cache, k, slots)
        reference.append(v_cache, v, slots)
        return
    from cai_kernels.paged_attention import triton

    triton.paged_append(k_cache, v_cache, k, v, slots)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention of new tokens over a paged cache (Kwon et al., arXiv:2309.06180), for decoding.

    Where sequences are few, the keys of each are split over programs and the parts merged by their log-sum-exps
    (flash decoding). How many parts there are depends on shapes alone, and where they end on lengths on the device, so
    that a CUDA graph of the call serves sequences that grow.

    Args:
        q: [B, N, H], one new token a sequence, float32, bfloat16 or float16, in the reference float64 too; H up to 256
            in Triton. Several new tokens of a sequence are rows with the same blocks and growing lengths.
        k_cache, v_cache: [blocks, block_size, Nkv, H] and the same of Hv, contiguous, any of these dtypes, N a
            multiple of Nkv. The new tokens' own keys are in them already.
        block_tables: [B, most] int32 or int64: the blocks of a sequence in order; entries past its length are not
            read.
        lengths: [B] int32 or int64: keys of a sequence, the new ones included. Zero gives zeros.
        scale: factor on q @ k.T; None: 1 / sqrt(H).
        window: the last so many keys of a row's are seen, its own among them; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: they stay.
        sinks: [N], any floating dtype: of each head the score of one more key, which has no value.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [.., N, Hv] in q's dtype. Takes no gradient. Nothing waits for lengths on the host. Raises `KernelError`
    naming the argument that does not fit.
    """
    form = choose(backend, q.device)
    dtypes = _PLAIN_DTYPES if form == "reference" else _DTYPES
    _check_query(q, k_cache, block_tables, lengths, dtypes)
    _check_caches(k_cache, v_cache, dtypes)
    _check_scores(q, window, softcap, sinks)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if form == "reference":
        options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        return reference.attention(q, (k_cache, v_cache), block_tables, lengths, **options)
    from cai_kernels.paged_attention import triton

    if max(q.shape[2], v_cache.shape[3]) > MAX_HEAD_DIM:
        raise KernelError(
            "head dim is too large for Triton",
            got=max(q.shape[2], v_cache.shape[3]),
            expected=f"up to {MAX_HEAD_DIM}",
        )
    return triton.paged_attention(q, k_cache, v_cache, block_tables, lengths, sinks, scale, window, softcap)


def _check_query(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    require("q", q, dtypes=dtypes)
    if k_cache.dim() != 4:
        raise KernelError(
            "k_cache has a wrong shape", got=tuple(k_cache.shape), expected="[blocks, block_size, Nkv, H]"
        )
    for name, tensor, its_dtypes in (
        ("k_cache", k_cache, dtypes),
        ("block_tables", block_tables, _WHOLE),
        ("lengths", lengths, _WHOLE),
    ):
        require(name, tensor, dtypes=its_dtypes, like=q)
    if q.dim() != 3 or q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise KernelError(
            "q does not fit the caches", got=tuple(q.shape), expected="[T, N, H], N a multiple of Nkv"
        )
    if block_tables.dim() != 2 or lengths.shape != block_tables.shape[:1]:
        raise KernelError(
            "lengths does not fit block_tables",
            got=f"{tuple(lengths.shape)}, block_tables {tuple(block_tables.shape)}",
            expected="[B], block_tables [B, most]",
        )
    if len(q) != len(lengths):
        raise KernelError("q does not fit lengths", got=tuple(q.shape), expected=f"{len(lengths)} rows")
    if torch.is_grad_enabled() and q.requires_grad:
        raise KernelError("paged_attention takes no gradient", got="q requires grad", fix="torch.no_grad()")


def _check_scores(
    q: torch.Tensor, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    if window is not None and window < 1:
        raise KernelError("window is out of range", got=window, expected="1 or more, or None")
    if softcap is not None and softcap <= 0:
        raise KernelError("softcap is out of range", got=softcap, expected="more than 0, or None")
    if sinks is not None:
        require("sinks", sinks, dtypes=_PLAIN_DTYPES, like=q)
        if sinks.shape != q.shape[1:2] or not sinks.is_contiguous():
            raise KernelError("one sink a head", got=tuple(sinks.shape), expected=f"({q.shape[1]},)")


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    require("k_cache", k_cache, dtypes=dtypes)
    require("v_cache", v_cache, dtypes=(k_cache.dtype,), like=k_cache)
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise KernelError(
            "v_cache does not fit k_cache",
            got=f"{tuple(v_cache.shape)}, k_cache {tuple(k_cache.shape)}",
            expected="both [blocks, block_size, Nkv, any]",
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not cache.is_contiguous():
            raise KernelError(f"{name} is not contiguous", got=cache.stride())
