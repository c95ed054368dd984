"""Cases of attention, packed sequences, pair-bias attention and decoding over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from case import Case

from cai_kernels import attention, paged_attention, pair_bias_attention, varlen_attention


def make_heads(batch: int, length: int, heads: int, key_heads: int, head: int) -> Callable:
    def inputs(device: torch.device) -> tuple:
        def draw(n: int) -> torch.Tensor:
            rows = torch.randn(batch, length, n, head, device=device, dtype=torch.bfloat16)
            return rows.transpose(1, 2).requires_grad_()

        return draw(heads), draw(key_heads), draw(key_heads)

    return inputs


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def windowed(window: int) -> tuple[Callable, Callable]:
    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        at = torch.arange(q.shape[2], device=q.device)
        distance = at[:, None] - at[None]
        mask = (distance >= 0) & (distance < window)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])

    return lambda q, k, v: attention(q, k, v, causal=True, window=window), eager


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = 30 * torch.tanh(scores / 30)
    at = torch.arange(q.shape[2], device=q.device)
    scores = scores.masked_fill(at[None] > at[:, None], -torch.inf)
    return torch.softmax(scores, -1) @ v.repeat_interleave(group, 1)


def make_packed(count: int, length: int, heads: int, head: int) -> Callable:
    def inputs(device: torch.device) -> tuple:
        shape = (count * length, heads, head)
        qkv = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        starts = torch.arange(count + 1, dtype=torch.int32, device=device) * length
        return *qkv, starts, length

    return inputs


def ours_packed(q, k, v, starts, length):
    return varlen_attention(q, k, v, starts, max_seqlen=length, causal=True)


def eager_packed(q, k, v, _starts, length):
    split = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(0, 1)


def make_pairs(rows: int, heads: int, length: int, head: int) -> Callable:
    def inputs(device: torch.device) -> tuple:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

        q, k, v, gate = (draw(1, rows, heads, length, head) for _ in range(4))
        mask = torch.zeros(1, rows, length, device=device)
        return q, k, v, draw(1, heads, length, length), mask, gate

    return inputs


def eager_pairs(q, k, v, bias, mask, gate):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores + bias[:, None] + mask[:, :, None, None].to(q.dtype)
    return torch.sigmoid(gate) * (torch.softmax(scores, -1) @ v)


def make_pages(batch: int, length: int, heads: int, key_heads: int, head: int) -> Callable:
    def inputs(device: torch.device) -> tuple:
        blocks = batch * length // 16
        caches = [
            torch.randn(blocks, 16, key_heads, head, device=device, dtype=torch.bfloat16) for _ in range(2)
        ]
        tables = torch.randperm(blocks, device=device).int().view(batch, -1)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        return torch.randn(batch, heads, head, device=device, dtype=torch.bfloat16), *caches, tables, lengths

    return inputs


def eager_pages(q, k_cache, v_cache, tables, _lengths):
    k, v = (cache[tables.long()].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
    return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def cases(tiny: bool) -> Iterator[Case]:
    sizes = [(1, 32, 4, 2, 16)] if tiny else [(4, 4096, 32, 8, 128), (1, 16384, 32, 8, 128)]
    window = 8 if tiny else 1024
    forms = [
        ("attention causal", lambda q, k, v: attention(q, k, v, causal=True), sdpa),
        ("attention window", *windowed(window)),
    ]
    for batch, length, heads, key_heads, head in sizes:
        flops = 2 * batch * heads * length * length * head  # causal counted once
        shape = f"{batch}x{length}, {heads}+{key_heads} heads of {head}"
        for op, ours, eager in forms:
            part = flops if op.endswith("causal") else min(flops, 4 * batch * heads * length * window * head)
            made = make_heads(batch, length, heads, key_heads, head)
            yield Case(op, shape, made, ours, eager, forward_flops=part, backward_flops=part * 5 // 2)
    batch, length, heads, key_heads, head = sizes[0] if tiny else (1, 4096, 16, 8, 128)
    flops = 2 * batch * heads * length * length * head
    yield Case(
        "attention softcap",
        f"{batch}x{length}, {heads}+{key_heads} heads of {head}",
        make_heads(batch, length, heads, key_heads, head),
        lambda q, k, v: attention(q, k, v, causal=True, softcap=30.0),
        capped,
        forward_flops=flops,
        backward_flops=flops * 5 // 2,
    )
    count, length, heads, head = (2, 16, 2, 16) if tiny else (8, 2048, 32, 128)
    flops = 2 * count * heads * length * length * head
    yield Case(
        "varlen_attention",
        f"{count} of {length}, {heads} heads of {head}",
        make_packed(count, length, heads, head),
        ours_packed,
        eager_packed,
        forward_flops=flops,
        backward_flops=flops * 5 // 2,
    )
    for rows, heads, length, head in (
        [(2, 2, 16, 8)] if tiny else [(256, 4, 256, 32), (384, 4, 384, 32), (128, 8, 256, 24)]
    ):
        flops = 4 * rows * heads * length * length * head
        yield Case(
            "pair_bias_attention",
            f"{rows} rows of {length}, {heads} heads of {head}",
            make_pairs(rows, heads, length, head),
            pair_bias_attention,
            eager_pairs,
            forward_flops=flops,
            backward_flops=flops * 5 // 2,
        )
    for batch, length in [(2, 32)] if tiny else [(1, 32768), (64, 4096)]:
        heads, key_heads, head = (4, 2, 16) if tiny else (32, 8, 128)
        yield Case(
            "paged_attention",
            f"{batch} of {length}, {heads}+{key_heads} heads of {head}",
            make_pages(batch, length, heads, key_heads, head),
            paged_attention,
            eager_pages,
            forward_bytes=4 * batch * length * key_heads * head,
        )
