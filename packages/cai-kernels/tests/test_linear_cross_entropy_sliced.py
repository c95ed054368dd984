"""Logits of all tokens in the memory of the weight's gradient: the same loss and gradients, without overlap."""

import pytest
import torch
from torch.nn import functional as F

from cai_kernels import linear_cross_entropy
from cai_kernels.linear_cross_entropy import slice_plan, sliced

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def small(monkeypatch):
    """Every weight is large enough, and slices and chunks of tokens are small."""
    monkeypatch.setattr(slice_plan, "MIN_WEIGHT_BYTES", 0)
    monkeypatch.setattr(slice_plan, "MAX_COLUMNS", 16)
    monkeypatch.setattr(slice_plan, "ROWS", 5)


def inputs(tokens: int, width: int, vocabulary: int):
    random = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, width, generator=random).bfloat16().to(DEVICE)
    weight = (torch.randn(vocabulary, width, generator=random) / 4).bfloat16().to(DEVICE)
    target = torch.randint(0, vocabulary, (tokens,), generator=random)
    target[1::5] = -100
    return x.requires_grad_(), weight.requires_grad_(), target.to(DEVICE)


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


SIZES = [(24, 16, 200), (12, 16, 200), (8, 32, 136), (40, 64, 72), (1, 8, 64)]
OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}]
LONG = (SIZES[0], SIZES[3])
"""Ten seconds and more under the interpreter."""


@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "options"),
    [
        pytest.param(*size, options, marks=pytest.mark.matrix if size in LONG else (), id=f"{size}-{number}")
        for size in SIZES
        for number, options in enumerate(OPTIONS)
    ],
)
def test_the_same_as_in_chunks_but_rounded_once(small, monkeypatch, tokens, width, vocabulary, options):
    x, weight, target = inputs(tokens, width, vocabulary)
    bias = torch.linspace(-1, 1, vocabulary, device=DEVICE).bfloat16().requires_grad_()
    leaves = (x, weight, bias)
    seen = []
    plainly = sliced.loss_and_gradients
    monkeypatch.setattr(sliced, "loss_and_gradients", lambda *a: seen.append(1) or plainly(*a))
    form = {"bias": bias, "backend": "triton", "chunk_bytes": 1 << 30, **options}
    monkeypatch.setattr(slice_plan, "saves_memory", lambda *_: True)
    got = gradients(linear_cross_entropy(x, weight, target, **form), *leaves)
    assert seen
    monkeypatch.setattr(slice_plan, "saves_memory", lambda *_: False)
    want = gradients(linear_cross_entropy(x, weight, target, **form), *leaves)
    assert len(seen) == 1
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-8 * b.abs().max().item())


def test_error_is_no_larger_than_eager(small, monkeypatch):
    monkeypatch.setattr(slice_plan, "saves_memory", lambda *_: True)
    x, weight, target = inputs(30, 16, 160)
    got = gradients(linear_cross_entropy(x, weight, target, backend="triton"), x, weight)
    eager = gradients(F.cross_entropy(F.linear(x, weight).float(), target), x, weight)
    double = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = gradients(F.cross_entropy(F.linear(*double), target), *double)
    for mine, theirs, truth in zip(got, eager, exact, strict=True):
        allowed = (theirs - truth).abs().max() + torch.finfo(mine.dtype).eps * truth.abs().max()
        assert (mine - truth).abs().max() <= allowed


def test_the_upstream_gradient_scales_the_gradients(small, monkeypatch):
    monkeypatch.setattr(slice_plan, "saves_memory", lambda *_: True)
    x, weight, target = inputs(30, 16, 160)
    once = gradients(linear_cross_entropy(x, weight, target, backend="triton"), x, weight)
    twice = gradients(linear_cross_entropy(x, weight, target, backend="triton") * 2, x, weight)
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("tokens", [1, 100, 512, 1024, 2048, 4096, 8192, 16384, 40000])
@pytest.mark.parametrize(
    ("vocabulary", "width"), [(128256, 4096), (128256, 8192), (32000, 2048), (151936, 1024)]
)
def test_no_gradient_is_written_where_logits_are_needed(tokens, vocabulary, width):
    plan = slice_plan.plan_slices(tokens, vocabulary, width)
    place = tokens * plan.columns
    assert plan.slices * plan.columns <= vocabulary and plan.first == vocabulary * width - plan.slices * place
    for i in range(plan.slices):
        assert (i + 1) * plan.columns * width <= plan.first + i * place
    assert plan.first + plan.slices * place == vocabulary * width


def test_sliced_only_where_it_saves_memory():
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    assert slice_plan.saves_memory(8192, weight) and slice_plan.saves_memory(
        8192, weight.expand(128256, 4096)
    )
    plan = slice_plan.plan_slices(8192, 128256, 4096)
    beside = 2 * 8192 * (128256 - plan.slices * plan.columns) + 4 * slice_plan.ROWS * 4096
    assert beside < 1.2 * 2**30 < 4 * weight.numel()  # a sum in float32 would be twice the gradient
    assert (
        not slice_plan.saves_memory(65536, weight)
        and not slice_plan.saves_memory(8192, weight.float())
        and not slice_plan.saves_memory(8192, weight[:999])
    )
