"""Cross-entropy: no less exact than eager torch, every option, split vocabularies, odd shapes and strides."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_checks import DEVICE, DTYPES
from torch.nn import functional as F

from cai_kernels import (
    CrossEntropyParts,
    KernelError,
    cross_entropy,
    cross_entropy_from_parts,
    cross_entropy_gradient,
    cross_entropy_parts,
)
from cai_kernels.cross_entropy import reference
from cai_kernels.cross_entropy.options import LOGIT_SUM
from cai_kernels.testing import assert_no_less_exact, results

SHAPES = [(5, 7, 123), (1, 64), (7, 1), (0, 16), (3, 2, 5000)]
OPTIONS = [
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-2},
    {"softcap": 5.0, "reduction": "sum"},
    {"softcap": 3.0, "label_smoothing": 0.3, "z_loss": 1e-3, "reduction": "none"},
]
FORMS = ["triton", "reference"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of lanes that are masked out


def inputs(shape, dtype=torch.float32, ignored=0.2):
    random = torch.Generator().manual_seed(sum(shape))
    logits = 3 * torch.randn(shape, generator=random)
    target = torch.randint(0, shape[-1], shape[:-1], generator=random)
    if target.numel() > 1:
        target[torch.rand(target.shape, generator=random) < ignored] = -100
    return logits.to(DEVICE, dtype), target.to(DEVICE)


def plain(
    logits, target, *, softcap=None, z_loss=0.0, reduction="mean", label_smoothing=0.0, ignore_index=-100
):
    """Written out from log-probabilities, beside the package's own reference."""
    x = logits.flatten(0, -2)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    t = target.flatten()
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    logs = torch.log_softmax(x, -1)
    counted = t != ignore_index
    picked = logs.gather(-1, torch.where(counted, t, 0)[:, None])[:, 0]
    rows = -(1 - label_smoothing) * picked - label_smoothing * logs.mean(-1)
    rows = torch.where(counted, rows + z_loss * torch.logsumexp(x, -1) ** 2, 0.0)
    if reduction == "none":
        return rows.view(target.shape)
    return rows.sum() / (counted.sum() if reduction == "mean" else 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_no_larger_than_eager(shape, dtype, options):
    logits, target = inputs(shape, dtype)
    if not target.numel() and options.get("reduction", "mean") == "mean":
        options = {**options, "reduction": "sum"}
    upstream = torch.full((), 0.7) if options.get("reduction") != "none" else torch.rand(shape[:-1])
    # dx of one column is the difference of equals: a rounding of p and of the smoothing remains, under their factor
    assert_no_less_exact(
        lambda x: cross_entropy(x, target, backend="triton", **options),
        lambda x: plain(x, target, **options),
        [logits],
        [upstream.to(DEVICE)],
        floor=[0.0, 4 * torch.finfo(torch.float32).eps],
    )


def test_many_rows_of_an_odd_shape():
    logits, target = inputs((5, 123 if DEVICE == "cuda" else 23, 123), torch.bfloat16)
    assert_no_less_exact(
        lambda x: cross_entropy(x, target, backend="triton"),
        lambda x: plain(x, target),
        [logits],
        [torch.ones((), device=DEVICE)],
    )


def test_more_rows_than_are_summed_at_once(monkeypatch):
    from cai_kernels.cross_entropy import triton

    monkeypatch.setattr(triton, "ROWS", 16)
    logits, target = inputs((41, 10))
    torch.testing.assert_close(cross_entropy(logits, target, backend="triton"), plain(logits, target))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reference_is_the_plain_form(options):
    logits, target = inputs((2, 3, 17), torch.float64)
    upstream = [torch.ones((2, 3) if options.get("reduction") == "none" else (), device=DEVICE)]
    ours = results(lambda x: cross_entropy(x, target, backend="reference", **options), [logits], upstream)
    theirs = results(lambda x: plain(x, target, **options), [logits], upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, target, backend="reference", **options), (logits.requires_grad_(),)
    )


@pytest.mark.parametrize("backend", FORMS)
def test_matches_torch(backend):
    logits, target = inputs((40, 33))
    for options in ({}, {"label_smoothing": 0.2}, {"reduction": "sum", "ignore_index": 3}):
        target = torch.where(target == -100, 3, target) if "ignore_index" in options else target
        torch.testing.assert_close(
            cross_entropy(logits, target, backend=backend, **options),
            F.cross_entropy(logits, target, **options),
        )
    nothing = torch.full_like(target, -100)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, nothing, backend=backend)
    loss.backward()
    assert math.isnan(loss.item()) and math.isnan(F.cross_entropy(logits, nothing).item())
    assert not x.grad.any()


def test_logits_far_from_zero_and_minus_infinity():
    logits, target = inputs((6, 300), ignored=0)
    far = (logits + 3e4).double().float()
    torch.testing.assert_close(
        cross_entropy(far, target, backend="triton"), plain(far.double(), target).float(), rtol=1e-6, atol=0
    )
    masked = logits.clone()
    masked[:, 200:] = -float("inf")
    target = target.clamp(max=199)
    ours = results(
        lambda x: cross_entropy(x, target, backend="triton"), [masked], [torch.ones((), device=DEVICE)]
    )
    theirs = results(lambda x: F.cross_entropy(x, target), [masked], [torch.ones((), device=DEVICE)])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_target_out_of_range_is_nan_and_reads_nothing_else():
    logits, target = inputs((4, 9), ignored=0)
    target[1] = 9
    rows = cross_entropy(logits, target, reduction="none", backend="triton")
    assert rows.isnan().tolist() == [False, True, False, False]


def test_ignored_rows_are_not_read():
    logits, target = inputs((8, 50))
    target[2] = -100
    logits[2] = float("nan")
    x = logits.requires_grad_()
    loss = cross_entropy(x, target, backend="triton")
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all() and not x.grad[target == -100].any()


def test_slices_are_read_where_they_lie(monkeypatch):
    logits, target = inputs((3, 7, 40))
    whole = logits.clone().requires_grad_()
    monkeypatch.setattr(
        torch.Tensor, "contiguous", lambda t: t if t.is_contiguous() else pytest.fail("copied")
    )
    loss = cross_entropy(whole[:, :-1], target[:, 1:].clone(), backend="triton")
    loss.backward()
    monkeypatch.undo()
    want = logits.clone().requires_grad_()
    plain(want[:, :-1], target[:, 1:]).backward()
    torch.testing.assert_close(whole.grad, want.grad)
    spread = torch.stack((logits, logits), -1)[..., 0]
    torch.testing.assert_close(cross_entropy(spread, target, backend="triton"), plain(logits, target))


@pytest.mark.parametrize("backend", FORMS)
def test_z_loss_is_returned_without_a_gradient(backend):
    logits, target = inputs((6, 20))
    x = logits.requires_grad_()
    loss, z = cross_entropy(x, target, z_loss=0.1, return_z_loss=True, backend=backend)
    assert not z.requires_grad
    torch.testing.assert_close(z, plain(logits, target, z_loss=0.1) - plain(logits, target))
    loss.backward()
    assert x.grad.abs().sum() > 0


def test_gradient_in_place_of_the_logits():
    logits, target = inputs((6, 50))
    want = results(
        lambda x: cross_entropy(x, target, backend="triton"), [logits], [torch.ones((), device=DEVICE)]
    )[1]
    leaf = logits.clone().requires_grad_()
    x = leaf * 1
    loss = cross_entropy(x, target, inplace_backward=True, backend="triton")
    loss.backward(retain_graph=True)
    assert torch.equal(leaf.grad, want) and torch.equal(x.detach(), want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_same_run_twice_is_the_same():
    logits, target = inputs((33, 777), torch.bfloat16)
    runs = [
        results(
            lambda x: cross_entropy(x, target, backend="triton", label_smoothing=0.1),
            [logits],
            [torch.ones((), device=DEVICE)],
        )
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_vocabulary_in_two_pieces(backend, in_place):
    logits, target = inputs((2, 5, 90))
    common = {"label_smoothing": 0.2, "z_loss": 1e-2}
    pieces = [(0, logits[..., :37]), (37, logits[..., 37:])]
    found = [
        cross_entropy_parts(x, target, vocab_start=at, softcap=4.0, logit_sum=True, backend=backend)
        for at, x in pieces
    ]
    lowest = torch.finfo(torch.float32).min
    assert all(
        (p.maximum[target == -100] == lowest).all() and not p.sum_exp[target == -100].any() for p in found
    )
    top = torch.maximum(found[0].maximum, found[1].maximum)
    merged = CrossEntropyParts(
        top,
        sum(p.sum_exp * (p.maximum - top).exp() for p in found),
        sum(p.target_logit for p in found),
        sum(p.logit_sum for p in found),
    )
    loss, z = cross_entropy_from_parts(merged, target, 90, **common)
    torch.testing.assert_close(loss, plain(logits, target, softcap=4.0, reduction="none", **common))
    assert (z[target == -100] == 0).all() and (z[target != -100] > 0).all()
    dloss = torch.where(target == -100, 0.0, torch.rand(2, 5).to(DEVICE))
    want = results(lambda x: plain(x, target, softcap=4.0, reduction="none", **common), [logits], [dloss])[1]
    pieces = [(at, x.clone()) for at, x in pieces]
    common = {**common, "softcap": 4.0, "backend": backend}
    got = [
        cross_entropy_gradient(
            x,
            target,
            merged,
            dloss,
            vocab=(at, 90),
            out=x if in_place else None,
            **common,
        )
        for at, x in pieces
    ]
    torch.testing.assert_close(torch.cat(got, -1), want)
    assert not in_place or all(g.data_ptr() == x.data_ptr() for g, (_, x) in zip(got, pieces, strict=True))


def test_the_ops_are_clean_for_the_compiler():
    from cai_kernels.cross_entropy import triton

    logits, target = inputs((4, 32))
    x = logits.clone().requires_grad_()
    torch.library.opcheck(triton.cross_entropy, (x, target, -100, triton.MEAN, 0.1, 1e-3, 0.0, False))
    torch.library.opcheck(triton.cross_entropy, (x, target, -100, triton.NONE, 0.0, 0.0, 5.0, False))
    scan = {"first": 0, "ignore_index": -100, "softcap": 0.0, "statistic": LOGIT_SUM}
    torch.library.opcheck(triton.cross_entropy_scan, (logits, target), scan)
    stats, dloss = triton.cross_entropy_scan(logits, target, **scan), torch.ones(4).to(DEVICE)
    options = {"first": 0, "vocabulary": 32, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": 0.0}
    arguments = (dloss, logits, target, stats, torch.empty_like(logits))
    torch.library.opcheck(triton.cross_entropy_gradient_, arguments, options)

    def step(a):
        return cross_entropy(a * 1, target, backend="triton", inplace_backward=True, softcap=5.0) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        results(compiled, [logits], [dloss[0]]), results(step, [logits], [dloss[0]]), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_no_gradient_is_computed_where_none_is_wanted(monkeypatch):
    from cai_kernels.cross_entropy import triton

    monkeypatch.setattr(triton, "write_gradient", lambda *a, **k: pytest.fail("a gradient was computed"))
    logits, target = inputs((4, 32))
    assert not cross_entropy(logits, target, backend="triton").requires_grad
    with torch.no_grad():
        assert not cross_entropy(logits.requires_grad_(), target, backend="triton").requires_grad


def test_errors_name_the_argument():
    logits, target = inputs((4, 32))
    for wrong, said in (
        ({"reduction": "avg"}, "unknown reduction"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"softcap": 0.0}, "softcap"),
        ({"backend": "fast"}, "unknown backend"),
    ):
        with pytest.raises(KernelError, match=said):
            cross_entropy(logits, target, **wrong)
    with pytest.raises(KernelError, match="logits has an unsupported dtype"):
        cross_entropy(logits.double(), target, backend="triton")
    with pytest.raises(KernelError, match="target has an unsupported dtype"):
        cross_entropy(logits, target.float())
    with pytest.raises(KernelError, match="target is on another device"):
        cross_entropy(logits, target.to("meta"))
    with pytest.raises(KernelError, match="target does not fit"):
        cross_entropy(logits, target[:-1])
    parts = reference.parts(logits, target, 0, -100, None)
    parts = CrossEntropyParts(*parts)
    with pytest.raises(KernelError, match="dloss does not fit"):
        cross_entropy_gradient(logits, target, parts, target[1:].float())
    with pytest.raises(KernelError, match="out does not fit"):
        cross_entropy_gradient(logits, target, parts, target.float(), out=logits[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs memory of a GPU")
def test_more_than_two_to_the_31_logits():
    logits = torch.zeros(20000, 128256, dtype=torch.bfloat16, device="cuda")
    logits[-1, 5] = 4.0
    target = torch.full((20000,), 5, device="cuda")
    x = logits.requires_grad_()
    rows = cross_entropy(x, target, reduction="none")
    rows.sum().backward()
    want = F.cross_entropy(logits[-1:].detach().double(), target[-1:])
    torch.testing.assert_close(rows[-1].detach().double(), want, rtol=1e-6, atol=0)
    assert abs(x.grad[-1].double().sum().item()) < 1e-2 and x.grad[-1, 5] < 0
