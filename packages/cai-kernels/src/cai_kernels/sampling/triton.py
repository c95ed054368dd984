"""Sampling in Triton: one program a row, filters as thresholds found without a sort.

The threshold of a filter is the largest float at or above which lie enough tokens, or enough of their probability. It
is looked for among the floats in order, a quarter of what is left a pass, over logits that stay in the cache. Without
filters the logits are read once.
"""

from __future__ import annotations

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import power_of_2
from cai_kernels.ops import define

BLOCK = 8192
SPLIT_ROWS = 64
"""The most rows that are drawn in parts, where no filter needs the whole row."""
LOWEST = tl.constexpr(-2139095041)  # the order of -inf


@triton.jit
def _logits(row, penalty, at, columns):
    """Logits of a row at columns `at`, penalized where seen; -inf past the end."""
    logits_ptr, seen_ptr = row
    z = tl.load(logits_ptr + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    if seen_ptr is not None:
        is_seen = tl.load(seen_ptr + at, mask=at < columns, other=0) != 0
        z = tl.where(is_seen, tl.where(z > 0.0, z / penalty, z * penalty), z)
    return z


@triton.jit
def _place(value, SHIFT: tl.constexpr):
    """The place of a float among all in order, without the SHIFT bits that its dtype never sets."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def _float(place, SHIFT: tl.constexpr):
    """The least float of a place."""
    bits = (place << SHIFT).to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(place <= (LOWEST >> SHIFT), float("-inf"), value)


@triton.jit
def _weight(z, highest, inverse, MASS: tl.constexpr):
    return tl.exp((z - highest) * inverse) if MASS else tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def _least(
    row, penalty, columns, scale, bounds, target, MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest place at or above which tokens weigh `target`, within bounds, the lower of which suffices."""
    highest, inverse = scale
    low, high = bounds
    while low < high:
        first = low + (high - low + 3) // 4
        second = low + (2 * (high - low) + 3) // 4
        third = low + (3 * (high - low) + 3) // 4
        a, b, c = _float(first, SHIFT), _float(second, SHIFT), _float(third, SHIFT)
        above_a = tl.zeros((BLOCK,), dtype=tl.float32)
        above_b = tl.zeros((BLOCK,), dtype=tl.float32)
        above_c = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, columns, BLOCK):
            z = _logits(row, penalty, start + tl.arange(0, BLOCK), columns)
            weight = _weight(z, highest, inverse, MASS)
            above_a += tl.where(z >= a, weight, 0.0)
            above_b += tl.where(z >= b, weight, 0.0)
            above_c += tl.where(z >= c, weight, 0.0)
        sum_a, sum_b, sum_c = tl.sum(above_a, 0), tl.sum(above_b, 0), tl.sum(above_c, 0)
        if sum_c >= target:
            low, weight_above = third, sum_c
        elif sum_b >= target:
            low, high, weight_above = second, third - 1, sum_b
        elif sum_a >= target:
            low, high, weight_above = first, second - 1, sum_a
        else:
            high, weight_above = first - 1, sum_a
        if weight_above == target:  # nothing between low and the place sought
            high = low
    return low


@triton.jit
def _gumbel(seed, row, start, BLOCK: tl.constexpr):
    """Gumbel noise of tokens start..start + BLOCK: four of each Philox block of 128 bits."""
    four = start // 4 + tl.arange(0, BLOCK // 4)
    zero = tl.zeros((BLOCK // 4,), dtype=tl.int32)
    a, b, c, d = tl.philox(seed, four, zero + row, zero, zero)
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))
    u = (bits >> 1).to(tl.int32).to(tl.float32) * 2.0**-31 + 2.0**-32
    u = tl.minimum(u, 1.0 - 2.0**-24)
    # -log(1 - u): where u is small, 1 - u would lose its digits, and those tokens are the ones drawn
    small = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.02, small, -tl.log(1.0 - u)))


@triton.jit
def _limit(ptr, row, value):
    return tl.load(ptr + row) if ptr is not None else value


@triton.jit
def _threshold(
    row, penalty, columns, limits, K: tl.constexpr, P: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The least logit that passes every filter."""
    temperature, top_k, top_p, min_p = limits
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        tops = tl.maximum(tops, _logits(row, penalty, start + tl.arange(0, BLOCK), columns))
    highest = tl.max(tops, 0)
    inverse = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
    scale = (highest, inverse)
    top = _place(highest, SHIFT)
    low = tl.full((), LOWEST >> SHIFT, tl.int64)
    if K and (top_k > 0) & (top_k < columns):
        count = top_k.to(tl.float32)
        low = _least(row, penalty, columns, scale, (low, top), count, False, SHIFT, BLOCK)
    if P and top_p < 1.0:
        mass = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, columns, BLOCK):
            z = _logits(row, penalty, start + tl.arange(0, BLOCK), columns)
            mass += tl.where(z >= _float(low, SHIFT), _weight(z, highest, inverse, True), 0.0)
        target = tl.sum(mass, 0) * top_p
        low = _least(row, penalty, columns, scale, (low, top), target, True, SHIFT, BLOCK)
    floor = highest + temperature * tl.log(tl.where(min_p > 0.0, min_p, 1.0))
    return tl.maximum(_float(low, SHIFT), tl.where(min_p > 0.0, floor, float("-inf")))


@triton.jit
def _best(row, limits, noise, columns, span, BLOCK: tl.constexpr):
    """The largest of noisy logits at or above a threshold in a span of columns, and the first token that has it."""
    temperature, penalty, threshold = limits
    key, noise_row = noise
    first, end = span
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = _logits(row, penalty, column, columns)
        noisy = z + temperature * _gumbel(key, noise_row, start, BLOCK)
        better = (z >= threshold) & (noisy > best)
        best = tl.where(better, noisy, best)
        token = tl.where(better, column, token)
    highest = tl.max(best, 0)
    return highest, tl.min(tl.where(best == highest, token, 2147483647), 0)


@triton.jit
def _merge(parts, out_ptr, count, PARTS: tl.constexpr):
    """The token of the part with the largest noisy logit; of equal ones the first."""
    bests_ptr, tokens_ptr = parts
    at = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    best = tl.load(bests_ptr + at * count + part, mask=part < count, other=float("-inf"))
    token = tl.load(tokens_ptr + at * count + part, mask=part < count, other=2147483647)
    chosen = tl.min(tl.where(best == tl.max(best, 0), token, 2147483647), 0)
    tl.store(out_ptr + at, tl.where(chosen == 2147483647, 0, chosen).to(tl.int64))


@triton.jit
def _sample(
    logits, seed_ptr, limits, values, parts, out_ptr, shape,
    OWN_SEED: tl.constexpr, K: tl.constexpr, P: tl.constexpr, MIN_P: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    logits_ptr, seen_ptr = logits
    temperature_ptr, k_ptr, p_ptr, min_ptr, penalty_ptr = limits
    temperature, top_k, top_p, min_p, penalty = values
    columns, stride, part_columns = shape
    at = tl.program_id(0).to(tl.int64)
    row = (logits_ptr + at * stride, None if seen_ptr is None else seen_ptr + at * columns)
    temperature = _limit(temperature_ptr, at, temperature)
    penalty = _limit(penalty_ptr, at, penalty)
    threshold = float("-inf")
    if K or P or MIN_P:
        top_k = _limit(k_ptr, at, top_k)
        passed = (temperature, top_k, _limit(p_ptr, at, top_p), _limit(min_ptr, at, min_p))
        threshold = _threshold(row, penalty, columns, passed, K, P, SHIFT, BLOCK)
    key = tl.load(seed_ptr + (at if OWN_SEED else 0))
    noise_row = (at * 0 if OWN_SEED else at).to(tl.int32)
    first = tl.program_id(1) * part_columns
    span = (first, tl.minimum(first + part_columns, columns))
    best, token = _best(row, (temperature, penalty, threshold), (key, noise_row), columns, span, BLOCK)
    if parts is not None:
        bests_ptr, tokens_ptr = parts
        part = at * tl.num_programs(1) + tl.program_id(1)
        tl.store(bests_ptr + part, best)
        tl.store(tokens_ptr + part, token)
    else:
        tl.store(out_ptr + at, tl.where(token == 2147483647, 0, token).to(tl.int64))


def _run(
    logits: torch.Tensor,
    seen: torch.Tensor | None,
    seed: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    repetition_penalty: torch.Tensor | None,
    *,
    temperature_value: float,
    top_k_value: float,
    top_p_value: float,
    min_p_value: float,
    repetition_penalty_value: float,
) -> torch.Tensor:
    """logits [B, V] -> tokens [B] int64; each limit is a tensor [B], or, where that is None, a value for all rows."""
    rows, columns = logits.shape
    out = logits.new_empty(rows, dtype=torch.int64)
    if not rows:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    limits = (temperature, top_k, top_p, min_p, repetition_penalty)
    values = (temperature_value, top_k_value, top_p_value, min_p_value, repetition_penalty_value)
    shift = 16 if logits.dtype == torch.bfloat16 and seen is None else 0
    filters = {
        "K": top_k is not None or 0 < top_k_value < columns,
        "P": top_p is not None or top_p_value < 1.0,
        "MIN_P": min_p is not None or min_p_value > 0.0,
    }
    block = max(min(power_of_2(columns), BLOCK), 16)
    count = 1 if any(filters.values()) or rows > SPLIT_ROWS else triton.cdiv(columns, block)
    parts = None
    if count > 1:
        parts = (
            logits.new_empty(rows, count, dtype=torch.float32),
            out.new_empty(rows, count, dtype=torch.int32),
        )
    launch = _sample[(rows, count)]  # pyright: ignore[reportIndexIssue]
    launch(
        (logits, None if seen is None else seen.contiguous()), seed,
        limits, values, parts, out, (columns, logits.stride(0), block if count > 1 else columns),
        OWN_SEED=seed.dim() == 1, **filters, SHIFT=shift, BLOCK=block,
        num_warps=max(min(block // 256, 32), 4),
    )  # fmt: skip
    if parts is not None:
        launch = _merge[(rows,)]  # pyright: ignore[reportIndexIssue]
        launch(parts, out, count, PARTS=power_of_2(count), num_warps=1)
    return out


def _empty(logits: torch.Tensor, *_, **__) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


sample = define(_run, _empty, name="sample")
