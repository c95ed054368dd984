"""Attention over a paged cache: as over each sequence's own keys, for any lengths, blocks and splits."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE

from cai_kernels import KernelError, paged_append_, paged_attention

BACKENDS = ["triton", "reference"]


def cache_of(lengths, block, key_heads, head, dtype, *, heads=4, each=None):
    """(q, caches, tables, lengths, the plain keys and values of each sequence); unused slots hold NaN."""
    random = torch.Generator().manual_seed(sum(lengths) + head)
    needed = [-(-n // block) for n in lengths]
    most = max(*needed, 1) + 1
    order = torch.randperm(sum(needed) + 2, generator=random).int()
    tables = torch.full((len(lengths), most), 10**6, dtype=torch.int32)
    caches = [torch.full((len(order), block, key_heads, head), torch.nan, dtype=dtype) for _ in range(2)]
    plain, used = [], 0
    for b, n in enumerate(lengths):
        tables[b, : needed[b]] = order[used : used + needed[b]]
        used += needed[b]
        rows = [torch.randn(n, key_heads, head, generator=random).to(dtype) for _ in range(2)]
        for p in range(n):
            for cache, row in zip(caches, rows, strict=True):
                cache[tables[b, p // block], p % block] = row[p]
        plain.append([r.to(DEVICE) for r in rows])
    q = torch.randn(sum(each or [1] * len(lengths)), heads, head, generator=random).to(DEVICE, dtype)
    moved = [c.to(DEVICE) for c in caches]
    return q, moved, tables.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE), plain


def one(q, k, v, scale):
    """[N, H] over [S, Nkv, H] in float64."""
    k, v = (t.double().repeat_interleave(q.shape[0] // t.shape[1], 1) for t in (k, v))
    if not len(k):
        return torch.zeros_like(q).double()
    scores = torch.einsum("nh,snh->ns", q.double(), k) * scale
    return torch.einsum("ns,snh->nh", torch.softmax(scores, -1), v)


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("block", "key_heads", "head"), [(16, 2, 32), (1, 4, 8), (5, 1, 123)])
def test_one_token_a_sequence(block, key_heads, head, dtype, backend):
    q, caches, tables, lengths, plain = cache_of([1, 70, 0, 16, 33], block, key_heads, head, dtype)
    out = paged_attention(q, *caches, tables, lengths, backend=backend)
    expected = torch.stack([one(q[b], *plain[b], head**-0.5) for b in range(5)])
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_split_over_programs(backend):
    from cai_kernels.paged_attention import triton

    q, caches, tables, lengths, plain = cache_of([600, 3], 32, 2, 16, torch.float32)
    if DEVICE == "cpu":
        assert triton.splits_of(2, 2, tables.shape[1] * 32, q.device) > 1
    out = paged_attention(q, *caches, tables.long(), lengths.long(), scale=0.5, backend=backend)
    expected = torch.stack([one(q[b], *plain[b], 0.5) for b in range(2)]).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_new_tokens_a_sequence(backend):
    each, held = [3, 0, 1, 5], [9, 4, 1, 5]
    q, caches, tables, lengths, plain = cache_of(held, 4, 2, 16, torch.float32, each=each)
    rows = torch.repeat_interleave(torch.arange(4), torch.tensor(each))
    counts = [
        count for last, new in zip(held, each, strict=True) for count in range(last - new + 1, last + 1)
    ]
    lengths = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    out = paged_attention(q, *caches, tables[rows.to(DEVICE)], lengths, backend=backend)
    row = 0
    for b, n in enumerate(each):
        for i in range(n):
            end = held[b] - n + i + 1
            expected = one(q[row], *(t[:end] for t in plain[b]), 0.25).float()
            torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-5)
            row += 1
    assert row == len(q)


def test_there_are_programs_for_all_multiprocessors():
    from cai_kernels.paged_attention import triton

    device = torch.device(DEVICE)
    for rows, key_heads, most in ((1, 1, 1), (1, 8, 100_000), (256, 8, 4096), (1, 1, 0), (3, 2, 257)):
        splits = triton.splits_of(rows, key_heads, most, device)
        assert 1 <= splits <= min(triton.MAX_SPLITS, max(-(-most // triton.KEYS), 1))


SCORES = {
    "window": {"window": 20},
    "window of many steps": {"window": 200},
    "soft cap": {"softcap": 0.7},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 4.0, 0.0])},
    "all": {"window": 70, "softcap": 2.0, "sinks": torch.tensor([1.3, -1.0, 0.0, -9.0])},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("case", list(SCORES))
def test_scores_of_other_forms(case, splits, backend, monkeypatch):
    from cai_kernels.paged_attention import triton

    monkeypatch.setattr(triton, "MAX_SPLITS", 64 if splits else 1)
    options = {name: value.to(DEVICE) if name == "sinks" else value for name, value in SCORES[case].items()}
    counts = [300, 0, 3, 70]
    queries, caches, tables, lengths, plain = cache_of(counts, 16, 2, 32, torch.float32)
    out = paged_attention(queries, *caches, tables, lengths, **options, backend=backend)
    window, softcap, sinks = (options.get(name) for name in ("window", "softcap", "sinks"))
    for number, count in enumerate(counts):
        pair = [rows[max(0, count - (window or count)) :] for rows in plain[number]]
        keys, values = (rows.double().repeat_interleave(2, 1) for rows in pair)
        scores = torch.einsum("nh,snh->ns", queries[number].double(), keys) * 32**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
        weights = torch.softmax(scores, -1)[:, : len(keys)] if scores.shape[1] else scores
        expected = torch.einsum("ns,snh->nh", weights, values)
        torch.testing.assert_close(out[number].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_another_width_and_queries_of_any_strides(backend):
    counts = [70, 5]
    queries, (k_cache, v_cache), tables, lengths, plain = cache_of(counts, 16, 2, 24, torch.float32)
    v_cache = v_cache[..., :16].contiguous()
    strided = queries.transpose(0, 1).contiguous().transpose(0, 1)
    out = paged_attention(strided, k_cache, v_cache, tables, lengths, backend=backend)
    for number in range(2):
        expected = one(queries[number], *plain[number], 24**-0.5)[:, :16]
        torch.testing.assert_close(out[number].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_appending(dtype, backend):
    caches = [torch.zeros(6, 4, 2, 24, dtype=dtype, device=DEVICE) for _ in range(2)]
    # values that either dtype holds: the interpreter's cast to bfloat16 cuts where a GPU rounds
    packed = torch.randn(5, 6, 24, device=DEVICE).bfloat16().float()
    k, v = packed[:, 2:4], packed[:, 4:]
    for slots in (torch.tensor([7, -1, 0, 23, 12]), torch.tensor([1, 2, 3, -1, -5], dtype=torch.int32)):
        expected = [c.clone() for c in caches]
        for cache, rows in zip(expected, (k, v), strict=True):
            for t, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    cache[slot // 4, slot % 4] = rows[t].to(dtype)
        paged_append_(*caches, k, v, slots.to(DEVICE), backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
    paged_append_(*caches, k[:0], v[:0], slots[:0].to(DEVICE), backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))


def test_the_ops_are_clean_for_the_compiler():
    from cai_kernels.paged_attention import triton

    q, caches, tables, lengths, _ = cache_of([5, 3], 4, 2, 16, torch.float32)
    torch.library.opcheck(triton.paged_attention, (q, *caches, tables, lengths, None, 0.5, None, None))
    rows = torch.randn(2, 2, 16, device=DEVICE)
    slots = torch.tensor([3, 9], device=DEVICE)
    empty = [torch.zeros_like(cache) for cache in caches]
    torch.library.opcheck(triton.paged_append, (*empty, rows, rows, slots))

    def step(q, rows, k_cache, v_cache):
        paged_append_(k_cache, v_cache, rows, rows, slots, backend="triton")
        return paged_attention(q, k_cache, v_cache, tables, lengths, backend="triton")

    ours, theirs = ([c.clone() for c in caches] for _ in range(2))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, rows, *ours), step(q, rows, *theirs), equal_nan=True)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_errors_name_the_argument():
    q, (k, v), tables, lengths, _ = cache_of([5, 3], 4, 2, 16, torch.float32)
    for match, arguments in (
        ("q does not fit the caches", (q[:, :3], k, v, tables, lengths)),
        ("v_cache does not fit k_cache", (q, k, v[:1], tables, lengths)),
        (
            "v_cache is not contiguous",
            (q, k, v.transpose(0, 1).contiguous().transpose(0, 1), tables, lengths),
        ),
        ("lengths does not fit block_tables", (q, k, v, tables, lengths[:1])),
        ("lengths has an unsupported dtype", (q, k, v, tables, lengths.float())),
        ("block_tables is on another device", (q, k, v, tables.to("meta"), lengths)),
        ("q does not fit lengths", (q[:1], k, v, tables, lengths)),
        ("takes no gradient", (q.clone().requires_grad_(), k, v, tables, lengths)),
    ):
        with pytest.raises(KernelError, match=match):
            paged_attention(*arguments)
    rows, slots = torch.zeros(2, 2, 16, device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    with pytest.raises(KernelError, match="v does not fit its cache and slots"):
        paged_append_(k, v, rows, rows[:1], slots)
    with pytest.raises(KernelError, match="slots has an unsupported dtype"):
        paged_append_(k, v, rows, rows, slots.float())
    with pytest.raises(KernelError, match="takes no gradient"):
        paged_append_(k, v, rows.requires_grad_(), rows, slots)
