"""Attention: every form gives what eager torch gives, the choice is what is said, parts merge into the whole."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from kernel_checks import DEVICE, DTYPES
from torch._subclasses.fake_tensor import FakeTensorMode

from cai_kernels import (
    KernelError,
    attention,
    attention_backward,
    attention_with_lse,
    explain_attention,
    last_queries_attention,
    merge_attention,
    prompt_attention,
    varlen_attention,
)
from cai_kernels.attention import choice, last_queries, partial
from cai_kernels.testing import assert_no_less_exact, results

# probabilities are computed again from the log-sum-exp: a few float32 roundings of the size of a score
ROUNDINGS = 8 * torch.finfo(torch.float32).eps


def tensors(batch, heads, key_heads, queries, keys, head, dtype=torch.float32):
    """q, k, v as modules give them, heads split off the last dim, and an upstream gradient."""
    random = torch.Generator().manual_seed(queries + head)

    def draw(length, n):
        return torch.randn(batch, length, n, head, generator=random).to(DEVICE, dtype).transpose(1, 2)

    return [draw(queries, heads), draw(keys, key_heads), draw(keys, key_heads)], draw(queries, heads)


def eager(*, causal=False, window=None, softcap=None, mask=None, scale=None, lse=False):
    """Attention as a user writes it, in the dtype of the inputs."""

    def run(q, k, v):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])[None]
        if causal:
            scores = scores.masked_fill((distance < 0).to(DEVICE), -torch.inf)
        if window is not None:
            scores = scores.masked_fill((distance.abs() >= window).to(DEVICE), -torch.inf)
        out = torch.softmax(scores, -1) @ v
        return (out, torch.logsumexp(scores, -1)) if lse else out

    return run


def close(ours, theirs, inputs, upstream, *, rtol=1e-4, atol=2e-5):
    for a, b in zip(results(ours, inputs, upstream), results(theirs, inputs, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


FORMS = [
    {},
    {"causal": True},
    {"window": 5},
    {"window": 36, "causal": True},
    {"softcap": 2.0, "causal": True},
    {"softcap": 3.0, "window": 7, "scale": 0.7},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_kernels_error_is_no_larger_than_eager(form, dtype):
    shape = (2, 2, 1, 37, 37, 20) if dtype == torch.float32 else (1, 2, 1, 70, 70, 24)
    inputs, dout = tensors(*shape, dtype)
    ours = lambda q, k, v: attention(q, k, v, backend="triton", **form)  # noqa: E731
    assert_no_less_exact(ours, eager(**form), inputs, [dout], floor=ROUNDINGS)


@pytest.mark.parametrize(
    "shape", [(1, 4, 2, 5, 9, 8), (2, 3, 3, 1, 1, 1), (1, 1, 1, 3, 40, 123), (0, 2, 1, 4, 4, 8)]
)
def test_odd_shapes(shape):
    inputs, dout = tensors(*shape)
    for backend in ("triton", "reference", "auto"):
        ours = lambda q, k, v, backend=backend: attention(q, k, v, backend=backend)  # noqa: E731
        close(ours, eager(), inputs, [dout])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_auto_takes_is_right(form):
    inputs, dout = tensors(2, 4, 2, 12, 12, 16)
    close(lambda q, k, v: attention(q, k, v, **form), eager(**form), inputs, [dout])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_masks_meet_causality_and_windows(window, causal):
    inputs, dout = tensors(2, 4, 2, 8, 8, 16)
    seen = torch.rand(2, 1, 8, 8, device=DEVICE) < 0.7
    seen |= torch.eye(8, dtype=torch.bool, device=DEVICE)
    for mask in (seen, torch.randn(4, 8, 8, device=DEVICE)):
        form = {"mask": mask, "causal": causal, "window": window}
        for backend in ("auto", "reference"):
            ours = lambda q, k, v, backend=backend, form=form: attention(q, k, v, backend=backend, **form)  # noqa: E731
            close(ours, eager(**form), inputs, [dout])
        softer = lambda q, k, v, form=form: attention(q, k, v, softcap=2.0, **form)  # noqa: E731
        close(softer, eager(softcap=2.0, **form), inputs, [dout])


def test_torchs_operators_by_name():
    inputs, dout = tensors(1, 4, 4, 8, 8, 16)  # not every torch has groups of heads in "efficient"
    for backend in ("math", "flash" if DEVICE == "cpu" else "efficient"):
        ours = lambda q, k, v, backend=backend: attention(q, k, v, causal=True, backend=backend)  # noqa: E731
        close(ours, eager(causal=True), inputs, [dout])


def test_dropout_drops_and_keeps_the_mean():
    (q, k, v), _ = tensors(1, 2, 2, 16, 16, 8)
    for softcap in (None, 5.0):
        torch.manual_seed(0)
        draws = torch.stack([attention(q, k, v, dropout=0.5, softcap=softcap) for _ in range(600)])
        assert (draws.std(0) > 0).all()
        assert (draws.mean(0) - attention(q, k, v, softcap=softcap)).abs().max() < 0.3


def test_explain_says_what_runs():
    (q, k, v), _ = tensors(1, 2, 2, 8, 8, 16)
    if DEVICE == "cpu":
        assert explain_attention(q, k, v).backend == "flash"
        assert explain_attention(q, k, v, window=3).backend == "flash"
        assert "folded" in explain_attention(q, k, v, window=3).reason
    assert explain_attention(q.double(), k.double(), v.double(), dropout=0.5).backend == "math"
    said = explain_attention(q, k, v, softcap=3.0, dropout=0.1)
    assert said.backend == "reference" and "no soft cap" in said.reason


def pretend(monkeypatch, major):
    """Every CUDA device is of this compute capability."""
    for module in (choice.forms, partial):
        monkeypatch.setattr(module, "capability", lambda _device: (major, 0))


def test_the_choice_on_gpus_that_are_not_here(monkeypatch):
    pretend(monkeypatch, 9)
    assert choice.order(torch.device("cuda"))[0] == choice.SDPA["cudnn"]
    monkeypatch.setattr(choice.forms, "why_not_triton", lambda _device: None)
    with FakeTensorMode():
        half = torch.empty(1, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
        odd = torch.empty(1, 2, 8, 20, device="cuda", dtype=torch.bfloat16)
        full = torch.empty(1, 2, 8, 64, device="cuda")
        mask = torch.empty(8, 8, device="cuda")
    for q, question, backend in (
        (half, choice.Question(), "sdpa"),
        (half, choice.Question(window=4), "flash_window"),
        (half, choice.Question(window=4, mask=mask), "sdpa"),
        (odd, choice.Question(window=4), "triton"),
        (full, choice.Question(window=4), "triton"),
        (full, choice.Question(window=4, dropout=0.1), "sdpa"),
        (half, choice.Question(softcap=4.0), "triton"),
        (half, choice.Question(softcap=4.0, mask=mask), "reference"),
    ):
        assert choice.decide(q, q, question).backend == backend, question
    pretend(monkeypatch, 8)
    assert choice.order(torch.device("cuda"))[0] == choice.SDPA["flash"]


LENGTHS = [
    ([5, 0, 33, 1], [5, 0, 33, 1]),
    ([4, 7, 2], [9, 3, 0]),
    ([12], [12]),
]


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    "form", [{}, {"causal": True}, {"causal": True, "window": 4}, {"window": 3}], ids=str
)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_sequences(lengths, form, backend):
    queries, keys = lengths
    random = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(sum(queries), 4, 16, generator=random).to(DEVICE) for _ in range(2))
    k, v = (torch.randn(sum(keys), 2, 16, generator=random).to(DEVICE) for _ in range(2))
    starts, key_starts = (torch.tensor([0, *n]).cumsum(0).int().to(DEVICE) for n in lengths)

    def loop(q, k, v):
        pieces = []
        bounds = zip(
            itertools.pairwise(starts.tolist()), itertools.pairwise(key_starts.tolist()), strict=True
        )
        for (a, b), (c, d) in bounds:
            row = torch.arange(b - a)[:, None] + (d - c) - (b - a)
            distance = (row - torch.arange(d - c)[None]).to(DEVICE)
            seen = torch.ones_like(distance, dtype=torch.bool)
            if form.get("causal"):
                seen &= distance >= 0
            if "window" in form:
                seen &= distance.abs() < form["window"]
            one = (t.transpose(0, 1).repeat_interleave(4 // t.shape[1], 0) for t in (q[a:b], k[c:d], v[c:d]))
            q1, k1, v1 = one
            scores = (q1 @ k1.transpose(-1, -2) / 4).masked_fill(~seen, -1e30)
            weights = torch.softmax(scores, -1) * seen
            pieces.append((weights @ v1).transpose(0, 1))
        return torch.cat(pieces)

    for longest in (None, 40):
        ours = lambda q, k, v, longest=longest: varlen_attention(  # noqa: E731
            q, k, v, starts, key_starts, max_seqlen=longest, backend=backend, **form
        )
        close(ours, loop, [q, k, v], [dout])


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
@pytest.mark.parametrize("causal", [False, True])
def test_log_sum_exp_and_backward_of_a_part(causal, backend):
    inputs, dout = tensors(2, 4, 2, 37, 37, 16)
    out, lse = attention_with_lse(*inputs, causal=causal, backend=backend)
    expected = results(eager(causal=causal, lse=True), inputs, [dout, torch.zeros_like(lse)])
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 37)
    gradients = attention_backward(dout, *inputs, out, lse, causal=causal, backend=backend)
    for got, want in zip((out, lse, *gradients), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_parts_make_the_whole(backend):
    inputs, dout = tensors(1, 4, 2, 12, 30, 16)
    q, k, v = inputs
    expected = results(eager(lse=True), inputs, [dout, torch.zeros(1, 4, 12, device=DEVICE)])
    out, lse = torch.zeros(q.shape, device=DEVICE), torch.full((1, 4, 12), -torch.inf, device=DEVICE)
    parts = [(k[:, :, i : i + 10], v[:, :, i : i + 10]) for i in range(0, 30, 10)]
    for part in parts:
        out, lse = merge_attention(out, lse, *attention_with_lse(q, *part, backend=backend))
    found = [attention_backward(dout, q, *part, out, lse, backend=backend) for part in parts]
    dq = sum(f[0] for f in found)
    dk, dv = (torch.cat([f[i] for f in found], 2) for i in (1, 2))
    for got, want in zip((out, lse, dq, dk, dv), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("queries", "keys", "width"), [(12, 30, 16), (1, 9, 16), (8, 9, 8)])
def test_the_last_queries_of_a_sequence(queries, keys, width):
    """Values may have fewer features, as in latent attention."""
    inputs, dout = tensors(2, 4, 2, queries, keys, 16)
    inputs[2], dout = inputs[2][..., :width].contiguous(), dout[..., :width]
    q, k, _ = inputs

    def whole(q, k, v):
        wide = torch.cat([q.new_zeros(2, 4, keys - queries, 16), q], 2)
        return eager(causal=True)(wide, k, v)[:, :, -queries:]

    ours = results(lambda q, k, v: last_queries_attention(q, k, v), inputs, [dout])
    for got, want in zip(ours, results(whole, inputs, [dout]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    for wrong in (q, k[:, :, :queries]):
        with pytest.raises(KernelError, match="fewer queries than keys"):
            last_queries_attention(q, wrong, wrong)


def by_a_mask(q, k, v, window):
    """Attention of the last queries with every score in memory."""
    queries, keys = q.shape[2], k.shape[2]
    behind = torch.arange(keys - queries, keys, device=q.device)[:, None] - torch.arange(
        keys, device=q.device
    )
    seen = (behind >= 0) & (behind < (window or keys))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(3) @ v


PROMPTS = [
    (12, 12, 16, None),
    (12, 30, 16, None),
    (12, 30, 16, 7),
    (9, 9, 16, 4),
    (1, 9, 16, 3),
    (8, 19, 8, None),
]


@pytest.mark.parametrize(("queries", "keys", "width", "window"), [*PROMPTS, (8, 19, 8, 5)])
def test_a_prompt(queries, keys, width, window):
    q, k, v = tensors(2, 4, 2, queries, keys, 16)[0]
    v = v[..., :width].contiguous()
    got = prompt_attention(q, k, v, window=window)
    torch.testing.assert_close(got, by_a_mask(q, k, v, window), rtol=1e-4, atol=2e-5)
    with pytest.raises(KernelError, match="more queries than keys"):
        prompt_attention(q, k[:, :, : queries - 1], v[:, :, : queries - 1])


def test_the_last_queries_of_projections_have_the_strides_that_graphs_expect():
    """Heads are neighbours of a token in what layers give; what comes out is without gaps, as it is said to be."""
    inputs, dout = tensors(2, 4, 2, 8, 20, 16)
    out, lse = last_queries._last_queries_attention(*inputs, 0.25)
    gradients = last_queries._last_queries_attention_backward(dout, *inputs, out, lse, 0.25)
    with FakeTensorMode(allow_non_fake_inputs=True):
        expected = last_queries._empty(*inputs, 0.25)
        expected += last_queries._empty_gradients(dout, *inputs, out, lse, 0.25)
    for got, want in zip((out, lse, *gradients), expected, strict=True):
        assert got.stride() == want.stride()


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_a_log_sum_exp_of_any_strides(backend):
    (q, k, v), dout = tensors(2, 4, 2, 12, 12, 16)
    out, lse = attention_with_lse(q, k, v, backend=backend)
    spread = lse.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    pairs = zip(
        *(attention_backward(dout, q, k, v, out, t, backend=backend) for t in (lse, spread)), strict=True
    )
    assert spread.stride() != lse.stride() and all(torch.equal(a, b) for a, b in pairs)


def test_which_of_torchs_operators_a_part_takes(monkeypatch):
    pretend(monkeypatch, 9)
    with FakeTensorMode():
        make = lambda *shape: torch.empty(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        q, one, wide, many = make(2, 4, 8, 64), make(2, 4, 1, 64), make(2, 4, 8, 256), make(65536, 1, 2, 64)
    assert partial._form(q, q, q, "auto") == partial._form(one, q, q, "auto") == "cudnn"
    assert partial._form(q, one, one, "auto") == "flash"
    assert partial._form(wide, wide, wide, "auto") == partial._form(many, many, many, "auto") == "flash"
    torch.use_deterministic_algorithms(True)
    try:
        assert partial._form(q, q, q, "auto") == "flash"
    finally:
        torch.use_deterministic_algorithms(False)
    pretend(monkeypatch, 8)
    assert partial._form(q, q, q, "auto") == "flash"


def test_merging():
    outs = [torch.randn(2, 5, 4, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(2, 5, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(merge_attention, (outs[0], lses[0], outs[1], lses[1]))
    nothing = torch.full((2, 5), -torch.inf, device=DEVICE)
    half = outs[0].detach().bfloat16()
    out, lse = merge_attention(half, lses[0].detach().float(), half * 7, nothing)
    assert out.dtype == torch.float32 and torch.equal(out, half.float())
    torch.testing.assert_close(lse, lses[0].detach().float())
    out, lse = merge_attention(half, nothing, half, nothing)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((2, 3, 37, 16), (0, 1, 2, 3)),
        ((2, 3, 37, 24), (0, 2, 1, 3)),
        ((1, 2, 5, 7), (3, 2, 1, 0)),
        ((9, 8), (0, 1)),
    ],
)
def test_the_kernel_merges_as_the_reference(shape, order, dtype):
    """Dims in the order of memory `order`, and rows of which one part or both saw no key."""
    random = torch.Generator().manual_seed(5)
    back = [order.index(dim) for dim in range(len(shape))]
    outs = [
        torch.randn([shape[dim] for dim in order], generator=random).to(DEVICE).permute(back)
        for _ in range(2)
    ]
    lses = [torch.randn(shape[:-1], generator=random).to(DEVICE) * 5 for _ in range(2)]
    lses[0][..., :2], lses[1][..., 1:3] = -torch.inf, -torch.inf
    outs = [out.to(dtype or torch.float32) for out in outs]
    given = (outs[0], lses[0], outs[1], lses[1])
    out, lse = merge_attention(*given, dtype=dtype, backend="triton")
    exact = merge_attention(*(t.double() for t in given))
    assert out.dtype == (dtype or torch.float32) and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-6, atol=1e-6)
    tolerance = {"rtol": 8e-3, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(out.double(), exact[0], **tolerance)
    same, _ = merge_attention(*given, dtype=dtype, backend="reference")
    torch.testing.assert_close(out, same, **tolerance)


def test_reference_gradients():
    inputs, _ = tensors(1, 2, 1, 4, 4, 3, torch.float64)
    leaves = [t.contiguous().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, causal=True, window=2, softcap=2.0, backend="reference"), leaves
    )


def test_the_same_run_twice_is_the_same():
    inputs, dout = tensors(1, 4, 2, 40, 40, 16, torch.bfloat16)
    run = lambda q, k, v: attention(q, k, v, softcap=3.0, causal=True, backend="triton")  # noqa: E731
    for a, b in zip(results(run, inputs, [dout]), results(run, inputs, [dout]), strict=True):
        assert torch.equal(a, b)


def test_the_ops_are_clean_for_the_compiler():
    from cai_kernels.attention import triton

    (q, k, v), _ = tensors(1, 2, 1, 6, 6, 16)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)
    packed = [t[0].detach().requires_grad_() for t in (q, k, v)]
    options = triton.Options(0.5, causal=True, longest_query=6, longest_key=6).arguments()
    torch.library.opcheck(triton.attention_forward, (*packed, None, None, None, starts, starts), options)
    for form in (
        {},
        {"window": 2, "causal": True},
        {"backend": "math"},
        {"softcap": 2.0, "backend": "triton"},
    ):
        whole = lambda q, form=form: attention(q * 2, k, v, **form) + 1  # noqa: E731
        compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q.requires_grad_()), whole(q))
    first, *others = (t.transpose(0, 1) for t in packed)
    whole = lambda q: varlen_attention(q * 2, *others, starts, backend="triton")  # noqa: E731
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(first), whole(first))


def test_errors_name_the_argument():
    (q, k, v), dout = tensors(1, 4, 2, 6, 6, 16)
    starts = torch.tensor([0, 6], dtype=torch.int32, device=DEVICE)
    for match, arguments, form in (
        ("k and v do not fit q", (q, k[:, :1].expand(1, 3, 6, 16), v), {}),
        ("k has an unsupported dtype", (q, k.half(), v), {}),
        ("need as many queries as keys", (q, k[:, :, :5], v[:, :, :5]), {"causal": True}),
        ("need as many queries as keys", (q, k[:, :, :5], v[:, :, :5]), {"window": 2}),
        ("window must be positive", (q, k, v), {"window": 0}),
        ("softcap must be positive", (q, k, v), {"softcap": 0.0}),
        (r"dropout must be in \[0, 1\)", (q, k, v), {"dropout": 1.0}),
        ("mask does not fit", (q, k, v), {"mask": torch.ones(3, 6, device=DEVICE)}),
        ("unknown backend", (q, k, v), {"backend": "fast"}),
        (
            r'"triton" attention cannot run here(.|\n)*mask',
            (q, k, v),
            {"mask": q[..., :6] > 0, "backend": "triton"},
        ),
        (
            r'"flash" attention cannot run here(.|\n)*no soft cap',
            (q, k, v),
            {"softcap": 1.0, "backend": "flash"},
        ),
        ("no window is given", (q, k, v), {"backend": "flash_window"}),
    ):
        with pytest.raises(KernelError, match=match):
            attention(*arguments, **form)
    with pytest.raises(KernelError, match='torch has no "flash" attention'):
        attention(q, k, v, dropout=0.5, backend="flash")
    with pytest.raises(KernelError, match="cu_seqlens has an unsupported dtype"):
        varlen_attention(q[0], k[0], v[0], starts.long())
    with pytest.raises(KernelError, match="k and v do not fit q"):
        varlen_attention(q[0].transpose(0, 1), k[0].transpose(0, 1)[:, :1], v[0].transpose(0, 1), starts)
    with pytest.raises(KernelError, match="not recorded by autograd"):
        attention_with_lse(q.requires_grad_(), k, v)
    with pytest.raises(KernelError, match="lse does not fit q"):
        attention_backward(dout, q, k, v, dout, dout)
    with pytest.raises(KernelError, match="lse_b does not fit its out"):
        merge_attention(q, q[..., 0], q, q)
    with pytest.raises(KernelError, match="takes no float64"):
        merge_attention(*(t.double() for t in (q, q[..., 0], q, q[..., 0])), backend="triton")


@pytest.mark.gpu
def test_prompts_on_the_gpu():
    """Right, also of values narrower than keys; and thirty lengths that are new take no time for plans."""
    for queries, keys, width, window in [*PROMPTS, (200, 1500, 16, 300), (200, 1500, 8, 300)]:
        q, k, v = (tensor.bfloat16() for tensor in tensors(2, 4, 2, queries, keys, 16)[0])
        got = prompt_attention(q, k, v[..., :width], window=window)
        want = by_a_mask(q.float(), k.float(), v[..., :width].float(), window)
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
    rows = [torch.randn(1, 8, length, 128, device=DEVICE, dtype=torch.bfloat16) for length in range(301, 331)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for row in rows:
        prompt_attention(row, row, row)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", [*FORMS, {"window": 130, "causal": True}], ids=str)
def test_forms_on_the_gpu(form, dtype):
    inputs, dout = tensors(2, 8, 2, 520, 520, 64, dtype)
    assert explain_attention(*inputs, **form).backend != "math" or dtype == torch.float32
    ours = results(lambda q, k, v: attention(q, k, v, **form), inputs, [dout])
    # in float64: eager in bfloat16 is off by more than this itself, as it rounds scores, probabilities and gradients
    exact = results(eager(**form), [t.double() for t in inputs], [dout.double()])
    for got, want in zip(ours, exact, strict=True):
        atol = 5e-2 if dtype != torch.float32 else 2e-3
        torch.testing.assert_close(got, want.to(dtype), rtol=2e-2, atol=atol)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parts_on_the_gpu(dtype, head):
    inputs, dout = tensors(2, 8, 2, 256, 256, head, dtype)
    for causal in (False, True):
        out, lse = attention_with_lse(*inputs, causal=causal)
        expected = results(eager(causal=causal, lse=True), inputs, [dout, torch.zeros_like(lse)])
        found = attention_backward(dout, *inputs, out, lse, causal=causal)
        for got, want in zip((out, lse, *found), expected, strict=True):
            torch.testing.assert_close(got, want.to(got.dtype), rtol=2e-2, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", [{}, {"causal": True}, {"causal": True, "window": 50}], ids=str)
def test_packed_sequences_on_the_gpu(form, dtype):
    lengths = [5, 300, 129, 1]
    starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    q, dout = (torch.randn(sum(lengths), 8, 64, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(sum(lengths), 2, 64, device="cuda", dtype=dtype) for _ in range(2))
    close(
        lambda q, k, v: varlen_attention(q, k, v, starts, max_seqlen=300, **form),
        lambda q, k, v: varlen_attention(q, k, v, starts, backend="reference", **form),
        [q, k, v],
        [dout],
        rtol=2e-2,
        atol=5e-2 if dtype != torch.float32 else 2e-3,
    )
