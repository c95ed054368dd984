"""Rows of documents: each document's attention is its own, in every form and with its gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_checks import DEVICE
from torch._subclasses.fake_tensor import FakeTensorMode

from cai_kernels import (
    KernelError,
    attention_backward,
    attention_with_lse,
    document_attention,
    document_tail_attention,
    merge_attention,
    sink_attention,
)
from cai_kernels.attention import reference
from cai_kernels.testing import results

BOUNDS = ((0, 5, 5, 33, 37), (0, 37, 37, 37, 37), (0, 1, 2, 20, 37))
"""Where documents of three rows of 37 begin; some are empty."""
FORMS = [{}, {"window": 6}, {"softcap": 2.0}, {"causal": False}, {"window": 4, "softcap": 3.0, "scale": 0.3}]


def tensors(heads=4, key_heads=2, head=16, length=37, dtype=torch.float32, device=DEVICE):
    random = torch.Generator().manual_seed(head)
    shapes = [(3, length, n, head) for n in (heads, key_heads, key_heads, heads)]
    return [torch.randn(s, generator=random).to(device, dtype).transpose(1, 2) for s in shapes]


def one_by_one(bounds, **form):
    form = {"causal": True, "scale": 0.25} | form

    def run(q, k, v):
        rows = [
            torch.cat(
                [
                    reference.attention(q[row, :, a:b], k[row, :, a:b], v[row, :, a:b], **form)[0]
                    for a, b in itertools.pairwise(places)
                    if a < b
                ],
                1,
            )
            for row, places in enumerate(bounds)
        ]
        return torch.stack(rows)

    return run


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_document_is_alone(form, backend):
    q, k, v, dout = tensors()
    starts = torch.tensor(BOUNDS, dtype=torch.int32, device=DEVICE)
    form = {"scale": 0.25} | form
    ours = results(
        lambda q, k, v: document_attention(q, k, v, starts, backend=backend, **form), [q, k, v], [dout]
    )
    theirs = results(one_by_one(BOUNDS, **form), [q, k, v], [dout])
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


LAST = ((0, 2, 2, 9, 11), (0, 11, 11, 11, 11), (0, 0, 1, 8, 11))
"""Where queries of the same documents begin, in rows of 11: each has as many keys, or more."""


def last_of_each(bounds, last, **form):
    """The last queries of each document by all of its keys, whose other queries stand empty before them."""
    whole = one_by_one(bounds, **form)

    def run(q, k, v):
        wide = torch.zeros(3, q.shape[1], k.shape[2], q.shape[3], dtype=q.dtype, device=q.device)
        places = [
            torch.cat(
                [
                    torch.arange(keys[d + 1] - (queries[d + 1] - queries[d]), keys[d + 1])
                    for d in range(len(keys) - 1)
                ]
            )
            for keys, queries in zip(bounds, last, strict=True)
        ]
        index = torch.stack(places).to(q.device)[:, None, :, None].expand(q.shape)
        return whole(wide.scatter(2, index, q), k, v).gather(2, index)

    return run


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_queries_may_be_the_last_of_each_document(form, backend):
    q, k, v, dout = tensors()
    q, dout = q[:, :, :11], dout[:, :, :11]
    starts, queries = (torch.tensor(bounds, dtype=torch.int32, device=DEVICE) for bounds in (BOUNDS, LAST))
    form = {"scale": 0.25} | form
    ours = results(
        lambda q, k, v: document_tail_attention(q, k, v, starts, queries, backend=backend, **form),
        [q, k, v],
        [dout],
    )
    theirs = results(last_of_each(BOUNDS, LAST, **form), [q, k, v], [dout])
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_parts_of_documents_make_the_whole(backend, softcap):
    """Keys in three sets, of which one has none of a document, and of the last the queries are causal."""
    q, k, v, dout = (tensor[:1] for tensor in tensors())
    lengths, cuts = (5, 0, 20, 12), ((0, 5), (0, 0), (9, 13), (0, 4))
    ends = list(itertools.accumulate(lengths, initial=0))
    own = [
        [*range(ends[d] + cuts[d][1], ends[d + 1])] for d in range(4)
    ]  # queries, and the keys of the last part
    parts = [
        [[*range(ends[d], ends[d] + cuts[d][0])] for d in range(4)],
        [[*range(ends[d] + cuts[d][0], ends[d] + cuts[d][1])] for d in range(4)],
        own,
    ]

    def starts(part):
        sizes = [len(places) for places in part]
        return torch.tensor([[*itertools.accumulate(sizes, initial=0)]], dtype=torch.int32, device=DEVICE)

    queries, *keys = ([*itertools.chain(*part)] for part in (own, *parts))
    options = {"scale": 0.25, "softcap": softcap, "backend": backend, "query_cu_seqlens": starts(own)}
    q_own, dout_own = q[:, :, queries].contiguous(), dout[:, :, queries]
    out, lse = torch.zeros_like(q_own), torch.full(q_own.shape[:-1], -torch.inf, device=DEVICE)
    calls = [
        ((k[:, :, places].contiguous(), v[:, :, places].contiguous()), options | {"causal": part is own})
        for part, places in zip(parts, keys, strict=True)
    ]
    for part, (tensors_of, call) in zip(parts, calls, strict=True):
        found = attention_with_lse(q_own, *tensors_of, cu_seqlens=starts(part), **call)
        out, lse = merge_attention(out, lse, *found)
    gradients = [
        attention_backward(dout_own, q_own, *tensors_of, out, lse, cu_seqlens=starts(part), **call)
        for part, (tensors_of, call) in zip(parts, calls, strict=True)
    ]
    expected = results(
        lambda q, k, v: one_by_one([ends], softcap=softcap)(q, k, v)[:, :, queries], [q, k, v], [dout_own]
    )
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(
        sum(each[0] for each in gradients), expected[1][:, :, queries], rtol=1e-4, atol=2e-5
    )
    for number, wanted in ((1, expected[2]), (2, expected[3])):
        for places, each in zip(keys, gradients, strict=True):
            torch.testing.assert_close(each[number], wanted[:, :, places], rtol=1e-4, atol=2e-5)


def with_a_sink(sinks, bounds, **form):
    """Each document alone, its keys behind one of the sink's score and no value."""
    scale = form["scale"]

    def run(q, k, v, sinks=sinks):
        rows = []
        for row, places in enumerate(bounds):
            parts = []
            for a, b in itertools.pairwise(places):
                key, value = (t[row, :, a:b].repeat_interleave(2, 0) for t in (k, v))
                scores = q[row, :, a:b] @ key.transpose(1, 2) * scale
                window = form.get("window")
                seen = reference.visible(b - a, b - a, causal=True, window=window, device=q.device)
                scores = scores.masked_fill(~seen, -torch.inf)
                sink = sinks[:, None, None].expand(-1, b - a, 1)
                parts.append(torch.cat([scores, sink], 2).softmax(-1)[:, :, :-1] @ value)
            rows.append(torch.cat(parts, 1))
        return torch.stack(rows)

    return run


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
@pytest.mark.parametrize("form", [{}, {"window": 6}], ids=str)
def test_sinks_take_their_part_of_each_softmax(form, backend):
    q, k, v, dout = tensors()
    sinks = torch.tensor([0.5, -1.0, 3.0, 8.0], device=DEVICE)
    starts = torch.tensor(BOUNDS, dtype=torch.int32, device=DEVICE)
    form = {"scale": 0.25} | form
    ours = results(
        lambda q, k, v, sinks: sink_attention(q, k, v, sinks, cu_seqlens=starts, backend=backend, **form),
        [q, k, v, sinks],
        [dout],
    )
    theirs = results(
        lambda q, k, v, sinks: with_a_sink(sinks, BOUNDS, **form)(q, k, v), [q, k, v, sinks], [dout]
    )
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    one = [(0, 37)] * 3
    whole = sink_attention(q, k, v, sinks, backend=backend, **form)
    torch.testing.assert_close(whole, with_a_sink(sinks, one, **form)(q, k, v), rtol=1e-4, atol=2e-5)
    with pytest.raises(KernelError, match="one sink a head"):
        sink_attention(q, k, v, sinks[:3])


def test_float64_and_dropout_take_the_mask():
    q, k, v, _ = tensors(dtype=torch.float64)
    starts = torch.tensor(BOUNDS, dtype=torch.int32, device=DEVICE)
    torch.testing.assert_close(
        document_attention(q, k, v, starts, scale=0.25), one_by_one(BOUNDS)(q, k, v), rtol=1e-9, atol=1e-12
    )
    torch.manual_seed(0)
    dropped = document_attention(q, k, v, starts, dropout=0.5)
    alone, heads = (
        dropped[2, :, 0],
        v[2, :, 0].repeat_interleave(2, 0),
    )  # a document of one key: all of it, or nothing
    assert all(torch.equal(got, 2 * key) or not got.any() for got, key in zip(alone, heads, strict=True))
    assert not torch.equal(dropped, document_attention(q, k, v, starts)) and dropped.isfinite().all()


def test_one_graph_and_no_values():
    q, k, v, _ = tensors()
    starts = torch.tensor(BOUNDS, dtype=torch.int32, device=DEVICE)
    compiled = torch.compile(document_attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, starts), document_attention(q, k, v, starts))
    torch.testing.assert_close(compiled(q, k, v, starts.flip(0)), document_attention(q, k, v, starts.flip(0)))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        shapes = [fake.from_tensor(t) for t in (q, k, v, starts)]
        assert document_attention(*shapes).shape == q.shape


def test_what_does_not_fit_is_named():
    q, k, v, _ = tensors()
    starts = torch.tensor(BOUNDS, dtype=torch.int32, device=DEVICE)
    for match, arguments in (
        ("cu_seqlens has a wrong shape", (q, k, v, starts[0])),
        ("cu_seqlens has a wrong shape", (q, k, v, starts[:2])),
        ("cu_seqlens has an unsupported dtype", (q, k, v, starts.long())),
        ("as many queries as keys", (q, k[:, :, 1:], v[:, :, 1:], starts)),
    ):
        with pytest.raises(KernelError, match=match):
            document_attention(*arguments)
    with pytest.raises(KernelError, match='"triton" attention cannot run here'):
        document_attention(q, k, v, starts, dropout=0.1, backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_on_the_gpu(form, dtype):
    q, k, v, dout = tensors(8, 2, 64, 37, dtype, "cuda")
    starts = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")
    form = {"scale": 0.25} | form
    ours = results(lambda q, k, v: document_attention(q, k, v, starts, **form), [q, k, v], [dout])
    exact = results(one_by_one(BOUNDS, **form), [t.double() for t in (q, k, v)], [dout.double()])
    for got, want in zip(ours, exact, strict=True):
        torch.testing.assert_close(
            got, want.to(dtype), rtol=2e-2, atol=5e-2 if dtype != torch.float32 else 2e-3
        )
