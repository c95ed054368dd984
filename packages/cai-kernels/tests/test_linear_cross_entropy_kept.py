"""Logits of all tokens kept where the weight's gradient will be: the same loss and gradients, without overlap."""

import pytest
import torch
from torch.nn import functional as F

from cai_kernels import linear_cross_entropy
from cai_kernels.linear_cross_entropy import kept

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def small(monkeypatch):
    """Every weight is large enough, and slices and chunks of tokens are small."""
    monkeypatch.setattr(kept, "FROM_BYTES", 0)
    monkeypatch.setattr(kept, "SLICE", 16)
    monkeypatch.setattr(kept, "ROWS", 5)


def inputs(tokens: int, width: int, vocabulary: int):
    random = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, width, generator=random).bfloat16().to(DEVICE)
    weight = (torch.randn(vocabulary, width, generator=random) / 4).bfloat16().to(DEVICE)
    target = torch.randint(0, vocabulary, (tokens,), generator=random)
    target[1::5] = -100
    return x.requires_grad_(), weight.requires_grad_(), target.to(DEVICE)


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary"), [(24, 16, 200), (12, 16, 200), (8, 32, 136), (40, 64, 72), (1, 8, 64)]
)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}], ids=str)
def test_the_same_as_in_chunks_but_rounded_once(small, monkeypatch, tokens, width, vocabulary, options):
    x, weight, target = inputs(tokens, width, vocabulary)
    bias = torch.linspace(-1, 1, vocabulary, device=DEVICE).bfloat16().requires_grad_()
    leaves = (x, weight, bias)
    seen = []
    plainly = kept.loss_and_gradients
    monkeypatch.setattr(kept, "loss_and_gradients", lambda *a: seen.append(1) or plainly(*a))
    form = {"bias": bias, "backend": "triton", "chunk_bytes": 1 << 30, **options}
    monkeypatch.setattr(kept, "pays", lambda *_: True)
    got = gradients(linear_cross_entropy(x, weight, target, **form), *leaves)
    assert seen
    monkeypatch.setattr(kept, "pays", lambda *_: False)
    want = gradients(linear_cross_entropy(x, weight, target, **form), *leaves)
    assert len(seen) == 1
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-8 * b.abs().max().item())


def test_error_is_no_larger_than_eager(small, monkeypatch):
    monkeypatch.setattr(kept, "pays", lambda *_: True)
    x, weight, target = inputs(30, 16, 160)
    got = gradients(linear_cross_entropy(x, weight, target, backend="triton"), x, weight)
    eager = gradients(F.cross_entropy(F.linear(x, weight).float(), target), x, weight)
    double = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = gradients(F.cross_entropy(F.linear(*double), target), *double)
    for mine, theirs, truth in zip(got, eager, exact, strict=True):
        allowed = (theirs - truth).abs().max() + torch.finfo(mine.dtype).eps * truth.abs().max()
        assert (mine - truth).abs().max() <= allowed


def test_the_upstream_gradient_scales_what_was_kept(small, monkeypatch):
    monkeypatch.setattr(kept, "pays", lambda *_: True)
    x, weight, target = inputs(30, 16, 160)
    once = gradients(linear_cross_entropy(x, weight, target, backend="triton"), x, weight)
    twice = gradients(linear_cross_entropy(x, weight, target, backend="triton") * 2, x, weight)
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("tokens", [1, 100, 512, 1024, 2048, 4096, 8192, 16384, 40000])
@pytest.mark.parametrize(
    ("vocabulary", "width"), [(128256, 4096), (128256, 8192), (32000, 2048), (151936, 1024)]
)
def test_no_gradient_is_written_where_logits_are_needed(tokens, vocabulary, width):
    made = kept.plan(tokens, vocabulary, width)
    place = tokens * made.columns
    assert made.slices * made.columns <= vocabulary and made.first == vocabulary * width - made.slices * place
    for i in range(made.slices):
        assert (i + 1) * made.columns * width <= made.first + i * place
    assert made.first + made.slices * place == vocabulary * width


def test_what_the_bar_allows():
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    assert kept.pays(8192, weight) and kept.pays(8192, weight.expand(128256, 4096))
    made = kept.plan(8192, 128256, 4096)
    beside = 2 * 8192 * (128256 - made.slices * made.columns) + 4 * kept.ROWS * 4096
    assert beside < 1.2 * 2**30 < 4 * weight.numel()  # a sum in float32 would be twice the gradient
    assert (
        not kept.pays(65536, weight)
        and not kept.pays(8192, weight.float())
        and not kept.pays(8192, weight[:999])
    )
