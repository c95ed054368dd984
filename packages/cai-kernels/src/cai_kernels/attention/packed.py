"""Attention within packed sequences by cuDNN, 1.4 to 2.3 times as fast on an H200 as torch's flash operator.

torch's own operator of cuDNN for packed sequences is slow; this one asks cuDNN's frontend for graphs of its own.
"""

from __future__ import annotations

import functools

import torch

from cai_kernels.attention import packed_graphs as graphs
from cai_kernels.attention.packed_graphs import Packed
from cai_kernels.backend import capability
from cai_kernels.ops import constant_in_graphs, define

OFFSETS = (graphs.Q_OFFSETS, graphs.K_OFFSETS, graphs.V_OFFSETS, graphs.OUT_OFFSETS, graphs.LSE_OFFSETS)
BACKWARD_OFFSETS = (graphs.DOUT_OFFSETS, graphs.DKV_OFFSETS)
LEAST = 16
"""The fewest tokens; cuDNN has no graph of one."""
MOST = 2**31 - 1
"""The last element that an offset of 32 bits reaches."""


def why_not_packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Return the reason why cuDNN does not compute the causal attention of packed sequences with themselves, or None.

    Args:
        query, key, value: as in `varlen_attention`, whose flash operator takes them.
    """
    if query.device.type != "cuda":
        return f"tensors are on {query.device.type}"
    if capability(query.device) < (9, 0):
        return "the GPU is older than Hopper, where nobody has measured it"
    if (reason := _why_not_installed()) is not None:
        return reason
    if query.shape[-1] > 128 or value.shape[-1] != query.shape[-1]:
        return f"head dims {query.shape[-1]} and {value.shape[-1]}; cuDNN takes equal ones up to 128"
    if query.shape[0] < LEAST:
        return f"fewer than {LEAST} tokens"
    if query.numel() > MOST:
        return "offsets of more than 32 bits"
    if torch.are_deterministic_algorithms_enabled():
        return "its gradients are not deterministic"
    return None


@constant_in_graphs
def _why_not_installed() -> str | None:
    return graphs.why_not_installed()


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return the attention of packed sequences, [T, N, H], contiguous; differentiable in query, key and value.

    Args:
        query: [T, N, H], bfloat16 or float16, as `why_not_packed` takes it.
        key, value: [T, Nkv, H].
        starts: [B + 1] int32, as `cu_seqlens` in `varlen_attention`.
        scale, window: as there; causal.
    """
    return packed_forward(query, key, value, starts, scale, window)[0]


def _packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _empty(query, key, value, starts, scale, window)
    query, key, value = (_aligned(tensor) for tensor in (query, key, value))
    packed = _packed(query, key, value, None, starts, scale, window)
    shared = {graphs.Q: query, graphs.K: key, graphs.V: value, graphs.OUT: out, graphs.LSE: lse}
    graphs.execute(packed, shared | _boundaries(packed, starts))
    return out, lse


def _packed_attention_backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = _empty_gradients(dout, query, key, value, out, lse, starts, scale, window)
    dout, query, key, value = (_aligned(tensor) for tensor in (dout, query, key, value))
    packed = _packed(query, key, value, dout, starts, scale, window)
    shared = {
        graphs.Q: query,
        graphs.K: key,
        graphs.V: value,
        graphs.OUT: out,
        graphs.LSE: lse,
        graphs.DOUT: dout,
    }
    shared |= dict(zip((graphs.DQ, graphs.DK, graphs.DV), gradients, strict=True))
    graphs.execute(packed, shared | _boundaries(packed, starts))
    return gradients


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dout: torch.Tensor | None,
    starts: torch.Tensor,
    scale: float,
    window: int | None,
) -> Packed:
    strided = (query, key, value) if dout is None else (query, key, value, dout)
    return Packed(
        device=query.get_device(),
        dtype=query.dtype,
        sequences=1 << (len(starts) - 2).bit_length(),
        tokens=graphs.rounded(query.shape[0]),
        heads=query.shape[1],
        key_heads=key.shape[1],
        width=query.shape[2],
        head_strides=tuple(tensor.stride(1) for tensor in strided),
        token_strides=tuple(tensor.stride(0) for tensor in strided),
        scale=scale,
        window=window,
        backward=dout is not None,
    )


def _boundaries(packed: Packed, starts: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return where sequences begin in each tensor, in elements, and how long they are; those not there are empty."""
    width = -(-(packed.sequences + 1) // 4) * 4  # each row of offsets begins at a multiple of 16 bytes
    starts = torch.cat([starts, starts[-1:].expand(width - len(starts))])
    offsets = starts * _token_elements(packed, starts.device)
    numbers = (*OFFSETS, *BACKWARD_OFFSETS) if packed.backward else OFFSETS
    lengths = {graphs.LENGTHS: starts[: packed.sequences + 1].diff()}
    return dict(zip(numbers, offsets.unbind(), strict=True)) | lengths


@functools.lru_cache(maxsize=graphs.KEPT)
def _token_elements(packed: Packed, device: torch.device) -> torch.Tensor:
    """Return the elements between two tokens of each tensor, in the order of their offsets, int32 [tensors, 1]."""
    rows, key_rows = packed.heads * packed.width, packed.key_heads * packed.width
    elements = [*packed.token_strides[:3], rows, packed.heads]
    if packed.backward:
        elements += [packed.token_strides[3], key_rows]
    return torch.tensor(elements, dtype=torch.int32, device=device)[:, None]


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as cuDNN reads it, itself if it lies so.

    Heads begin at multiples of 16 bytes, none lies on another, as in an expanded tensor, and an offset has 32 bits.
    """
    strides = tensor.stride()
    fits = strides[2] == 1 and all(stride > 0 and stride % 8 == 0 for stride in strides[:2])
    fits = fits and tensor.storage_offset() % 8 == 0 and len(tensor) * strides[0] <= MOST
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _empty(query, key, value, starts, scale, window):
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _empty_gradients(dout, query, key, value, out, lse, starts, scale, window):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, _dlse):
    query, key, value, starts, out, lse = ctx.saved_tensors
    if dout is None:
        return (None,) * 6
    gradients = packed_backward(dout, query, key, value, out, lse, starts, ctx.scale, ctx.window)
    return *gradients, None, None, None


packed_backward = define(_packed_attention_backward, _empty_gradients)
packed_forward = define(_packed_attention, _empty, save=_save, backward=_differentiate)
