"""Packed sequences by cuDNN: the numbers on a GPU; elsewhere a stand-in that reads memory as a graph would."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from cai_kernels import varlen_attention
from cai_kernels.attention import packed, packed_graphs
from cai_kernels.attention.reference import attention
from cai_kernels.testing import results

LENGTHS = {"mixed": (5, 0, 13, 1, 70, 0), "one": (64,), "equal": (16, 16, 16, 16), "three": (9, 30, 2)}


def tensors(lengths, heads=4, key_heads=2, width=16, dtype=torch.float32, device="cpu"):
    random = torch.Generator().manual_seed(width)
    tokens = sum(lengths)
    qkv = torch.randn(tokens, heads + 2 * key_heads, width, generator=random).to(device, dtype)
    dout = torch.randn(tokens, heads, width, generator=random).to(device, dtype)
    starts = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32, device=device)
    return *qkv.split((heads, key_heads, key_heads), 1), dout, starts


def one_by_one(starts, **options):
    def run(q, k, v):
        outs = [
            attention(*(t[a:b].transpose(0, 1)[None] for t in (q, k, v)), causal=True, **options)[0][0]
            for a, b in itertools.pairwise(starts.tolist())
            if a < b
        ]
        return torch.cat(outs, 1).transpose(0, 1)

    return run


def stand_in(graph, memory):
    """What a graph computes, from the memory of its tensors and the offsets and strides that it is told."""
    assert min(*graph.token_strides, *graph.head_strides) > 0  # nothing lies on anything else
    assert max(map(max, (memory[number].tolist() for number in packed.OFFSETS))) <= packed.MOST
    lengths = memory[packed_graphs.LENGTHS].tolist()
    assert len(lengths) == graph.sequences
    assert sum(lengths) <= graph.tokens

    def read(number, offsets, heads, strides, width=graph.width):
        tensor = memory[number]
        assert len(memory[offsets]) > graph.sequences
        assert memory[offsets].storage_offset() % 4 == 0
        return [
            tensor.as_strided((length, heads, width), (*strides, 1), tensor.storage_offset() + at)
            for length, at in zip(lengths, memory[offsets].tolist(), strict=False)
        ]

    numbers = packed_graphs
    strides = list(zip(graph.token_strides, graph.head_strides, strict=True))
    rows = graph.heads * graph.width, graph.width
    q = read(numbers.Q, numbers.Q_OFFSETS, graph.heads, strides[0])
    k = read(numbers.K, numbers.K_OFFSETS, graph.key_heads, strides[1])
    v = read(numbers.V, numbers.V_OFFSETS, graph.key_heads, strides[2])
    out = read(numbers.OUT, numbers.OUT_OFFSETS, graph.heads, rows)
    lse = read(numbers.LSE, numbers.LSE_OFFSETS, graph.heads, (graph.heads, 1), 1)
    gradients = [()] * len(lengths)
    if graph.backward:
        key_rows = graph.key_heads * graph.width, graph.width
        gradients = list(
            zip(
                read(numbers.DOUT, numbers.DOUT_OFFSETS, graph.heads, strides[3]),
                read(numbers.DQ, numbers.OUT_OFFSETS, graph.heads, rows),
                read(numbers.DK, numbers.DKV_OFFSETS, graph.key_heads, key_rows),
                read(numbers.DV, numbers.DKV_OFFSETS, graph.key_heads, key_rows),
                strict=True,
            )
        )
    for *inputs, length, o, s, of_it in zip(q, k, v, lengths, out, lse, gradients, strict=True):
        if not length:
            continue
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in inputs]
            own, sums = attention(
                *(t.transpose(0, 1)[None] for t in leaves),
                causal=True,
                scale=graph.scale,
                window=graph.window,
            )
        if not graph.backward:
            o.copy_(own[0].transpose(0, 1).detach())
            s.copy_(sums[0].transpose(0, 1)[..., None].detach())
            continue
        torch.testing.assert_close(o, own[0].transpose(0, 1))
        torch.testing.assert_close(s[..., 0], sums[0].transpose(0, 1))
        dout, *places = of_it
        for place, gradient in zip(
            places, torch.autograd.grad(own[0].transpose(0, 1), leaves, dout), strict=True
        ):
            place.copy_(gradient)


def beside(graph, memory):
    """The stand-in in a thread of its own: an operator's own thread records no gradients."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(stand_in, graph, memory).result()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_graph_finds_every_sequence(lengths, window, monkeypatch):
    monkeypatch.setattr(packed_graphs, "execute", beside)
    q, k, v, dout, starts = tensors(LENGTHS[lengths])
    ours = results(
        lambda q, k, v: packed.packed_attention(q, k, v, starts, scale=0.3, window=window), [q, k, v], [dout]
    )
    theirs = results(one_by_one(starts, scale=0.3, window=window), [q, k, v], [dout])
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_memory_of_any_strides(monkeypatch):
    monkeypatch.setattr(packed_graphs, "execute", beside)
    q, k, v, _, starts = tensors(LENGTHS["mixed"])
    heads_first = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    odd = [torch.cat([t, t[..., :1]], -1)[..., :-1] for t in (q, k, v)]
    far = [torch.empty_strided(t.shape, (2**10, 16, 1)).copy_(t) for t in (q, k, v)]
    monkeypatch.setattr(packed, "MOST", 2**16)  # so that `far` reaches beyond it
    want = one_by_one(starts, scale=0.3)(q, k, v)
    for strided in (heads_first, odd, far):
        got = packed.packed_attention(*strided, starts, scale=0.3, window=None)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    shared = [q, k[:, :1].expand(-1, 2, -1), v[:, :1].expand(-1, 2, -1)]  # one head for all, as before groups
    got = packed.packed_attention(*shared, starts, scale=0.3, window=None)
    torch.testing.assert_close(got, one_by_one(starts, scale=0.3)(*shared), rtol=1e-4, atol=1e-5)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = packed.packed_attention(*inputs, starts, scale=0.3, window=None)
    expanded = torch.autograd.grad(out.sum(), inputs)  # a gradient that is one number
    whole = torch.autograd.grad(one_by_one(starts, scale=0.3)(*inputs).sum(), inputs)
    for got, want in zip(expanded, whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_one_graph_serves_many_lengths():
    q, k, v, _, starts = tensors((5, 20, 30, 9))
    others = [tensors(lengths)[4] for lengths in ((1, 1, 61, 1), (20, 20, 24))]
    graphs = {packed._packed(q, k, v, None, each, 0.3, None) for each in (starts, *others)}
    assert len(graphs) == 1
    assert packed_graphs.rounded(32768) == 32768
    assert [packed_graphs.rounded(n) for n in (1, 7, 1000, 1025)] == [1, 7, 1024, 1152]
    assert all(n <= packed_graphs.rounded(n) <= n * 9 / 8 for n in range(1, 5000))


def test_what_cudnn_is_not_asked_for(monkeypatch):
    q, k, v, *_ = tensors((16,), dtype=torch.bfloat16)
    assert packed.why_not_packed(q, k, v) == "tensors are on cpu"
    q, k, v = (torch.empty_like(t, device="meta") for t in (q, k, v))
    monkeypatch.setattr(packed, "capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    assert "older than Hopper" in packed.why_not_packed(q, k, v)
    monkeypatch.setattr(packed, "capability", lambda device: (9, 0))
    monkeypatch.setattr(packed_graphs, "why_not_installed", lambda: "not installed")
    assert packed.why_not_packed(q, k, v) == "not installed"
    monkeypatch.setattr(packed_graphs, "why_not_installed", lambda: None)
    assert packed.why_not_packed(q, k, v) is None
    assert "32 bits" in packed.why_not_packed(torch.empty(2**25, 4, 16, device="meta"), k, v)
    wide = torch.empty(16, 4, 160, device="meta")
    assert "up to 128" in packed.why_not_packed(wide, wide, wide)
    assert all("fewer than 16" in packed.why_not_packed(q[:n], k[:n], v[:n]) for n in (0, 1, 15))
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in packed.why_not_packed(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_frontend_that_does_not_start_is_left_alone(monkeypatch):
    packed_graphs.why_not_installed.cache_clear()
    try:
        monkeypatch.setattr(packed_graphs.importlib.util, "find_spec", lambda name: None)
        assert "pip install cai-kernels[cudnn]" in packed_graphs.why_not_installed()
        packed_graphs.why_not_installed.cache_clear()
        monkeypatch.setattr(packed_graphs.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, "cudnn", None)
        assert "does not start" in packed_graphs.why_not_installed()
        for version, backend, reason in (
            ("1.24.0", 91900, "frontend 1.24.0 is older than 1.28"),
            ("1.28.0", 90500, "cuDNN 90500 is older"),
            ("1.32.0", 91900, None),
        ):
            packed_graphs.why_not_installed.cache_clear()
            installed = SimpleNamespace(__version__=version, backend_version=lambda backend=backend: backend)
            monkeypatch.setitem(sys.modules, "cudnn", installed)
            found = packed_graphs.why_not_installed()
            assert found is reason or reason in found
    finally:
        packed_graphs.why_not_installed.cache_clear()


def test_one_graph_of_torch(monkeypatch):
    monkeypatch.setattr(packed_graphs, "execute", beside)
    q, k, v, _, starts = tensors(LENGTHS["mixed"])
    compiled = torch.compile(packed.packed_attention, fullgraph=True, backend="aot_eager")
    got = compiled(q, k, v, starts, scale=0.3, window=None)
    torch.testing.assert_close(got, one_by_one(starts, scale=0.3)(q, k, v), rtol=1e-4, atol=1e-5)


HEADS = [
    (4, 4, 64, torch.float16),
    (8, 1, 128, torch.bfloat16),
    (6, 2, 96, torch.bfloat16),
    (2, 2, 16, torch.float16),
    *((4, 2, width, torch.bfloat16) for width in (8, 24, 40, 72, 80, 112, 120)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "key_heads", "width", "dtype"), HEADS)
def test_on_the_gpu(heads, key_heads, width, dtype, window):
    """Errors beside float64 are at most those of torch's flash operator."""
    if (reason := packed_graphs.why_not_installed()) is not None:
        pytest.skip(reason)
    q, k, v, dout, starts = tensors((700, 5, 0, 1, 130, 64, 300), heads, key_heads, width, dtype, "cuda")
    assert packed.why_not_packed(q, k, v) is None
    exact = results(
        one_by_one(starts, scale=0.1, window=window), [t.double() for t in (q, k, v)], [dout.double()]
    )
    ours = results(
        lambda q, k, v: varlen_attention(q, k, v, starts, causal=True, scale=0.1, window=window),
        [q, k, v],
        [dout],
    )
    compiled = torch.compile(varlen_attention, fullgraph=True)
    again = results(
        lambda q, k, v: compiled(q, k, v, starts, causal=True, scale=0.1, window=window), [q, k, v], [dout]
    )
    flash = results(
        lambda q, k, v: varlen_attention(q, k, v, starts, starts, causal=True, scale=0.1, window=window),
        [q, k, v],
        [dout],
    )
    for want, *got in zip(exact, ours, again, flash, strict=True):
        own, compiled_own, peer = ((g.double() - want).norm() / want.norm() for g in got)
        assert own < 1.05 * peer
        assert compiled_own < 1.05 * peer


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (2000,), (0, 0, 7)])
def test_odd_sizes_and_shared_heads_on_the_gpu(lengths):
    if (reason := packed_graphs.why_not_installed()) is not None:
        pytest.skip(reason)
    q, k, v, dout, starts = tensors(lengths, 8, 8, 128, torch.bfloat16, "cuda")
    for one in (slice(None), slice(0, 1)):  # each head its own, and one expanded for all
        inputs = [q, *(t[:, one].expand(-1, 8, -1) for t in (k, v))]
        exact = results(one_by_one(starts, scale=0.1), [t.double() for t in inputs], [dout.double()])
        ours = results(
            lambda q, k, v: varlen_attention(q, k, v, starts, causal=True, scale=0.1), inputs, [dout]
        )
        for got, want in zip(ours, exact, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_captured_and_from_another_stream():
    if (reason := packed_graphs.why_not_installed()) is not None:
        pytest.skip(reason)
    q, k, v, _, starts = tensors((700, 300, 24), 8, 2, 128, torch.bfloat16, "cuda")
    want = varlen_attention(q, k, v, starts, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = varlen_attention(q, k, v, starts, causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(beside, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = varlen_attention(q, k, v, starts, causal=True)
    starts.copy_(torch.tensor((0, 24, 324, 1024), dtype=torch.int32))
    graph.replay()
    assert torch.equal(captured, varlen_attention(q, k, v, starts, causal=True))
    assert not torch.equal(captured, want)
