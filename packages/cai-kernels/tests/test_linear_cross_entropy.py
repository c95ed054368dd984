"""Linear layer and cross-entropy in chunks: exact as eager torch, bounded memory, no work nobody asked for."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, DTYPES
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cai_kernels import (
    KernelError,
    linear_cross_entropy,
    linear_cross_entropy_forward,
    linear_cross_entropy_input_grad,
    linear_cross_entropy_weight_grad,
    linear_log_probs,
)
from cai_kernels.cross_entropy.options import ENTROPY, LOGIT_SUM, PLAIN, LossOptions
from cai_kernels.linear_cross_entropy import autograd, chunked, reference
from cai_kernels.linear_cross_entropy.inputs import chunk_rows
from cai_kernels.linear_cross_entropy.options import Execution, Needed
from cai_kernels.testing import assert_no_less_exact, results

FORMS = ["triton", "reference"]
OPTIONS = [
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "backward": "split"},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "reduction": "sum"},
    {"softcap": 3.0, "reduction": "none"},
]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of lanes that are masked out


def inputs(tokens=11, width=24, columns=123, dtype=torch.float32):
    random = torch.Generator().manual_seed(tokens + columns)
    x = torch.randn(tokens, width, generator=random).to(DEVICE, dtype)
    weight = (torch.randn(columns, width, generator=random) / 3).to(DEVICE, dtype)
    target = torch.randint(0, columns, (tokens,), generator=random)
    if tokens > 3:
        target[2] = -100
    return x, weight, target.to(DEVICE)


def plain(x, weight, bias, target, **options):
    """F.linear, then what `cross_entropy` is held to in its own tests."""
    options.pop("backward", None)
    return reference.linear_cross_entropy(x, weight, target, bias, **options)[0]


def upstream_of(target, options):
    random = torch.Generator().manual_seed(3)
    shape = target.shape if options.get("reduction") == "none" else ()
    return [torch.rand(shape, generator=random).to(DEVICE)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", FORMS)
def test_error_is_no_larger_than_eager(backend, dtype, options):
    x, weight, target = inputs(dtype=dtype)
    bias = weight[:, 0].clone()
    upstream = upstream_of(target, options)
    # the fused form multiplies by the upstream gradient last: one rounding more of the largest term of each sum
    term = (
        torch.finfo(torch.float32).eps
        * upstream[0].max().item()
        * max(weight.abs().max(), x.abs().max()).item()
    )
    assert_no_less_exact(
        lambda x, w, b: linear_cross_entropy(
            x, w, target, bias=b, backend=backend, chunk_bytes=2000, **options
        ),
        lambda x, w, b: plain(x, w, b, target, **options),
        [x, weight, bias],
        upstream,
        floor=[0.0, *[term / (10 if options.get("reduction", "mean") == "mean" else 1)] * 3],
    )


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("columns", [1, 40])
def test_odd_shapes(tokens, columns, backend):
    x, weight, target = inputs(tokens, 5, columns)
    options = {"reduction": "sum"}
    want = results(
        lambda x, w: plain(x, w, None, target, **options), [x, weight], [torch.ones((), device=DEVICE)]
    )
    for backward in ("fused", "split"):
        got = results(
            lambda x, w, backward=backward: linear_cross_entropy(
                x, w, target, backend=backend, backward=backward, chunk_bytes=1, **options
            ),
            [x, weight],
            [torch.ones((), device=DEVICE)],
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_batched_and_strided_inputs():
    x, weight, target = inputs(24)
    x, target = x.view(4, 6, -1)[:, :-1], target.view(4, 6)[:, 1:]
    transposed = weight.t().contiguous().t()
    options = {"reduction": "none"}
    want = results(
        lambda x, w: plain(x.flatten(0, 1), w, None, target.flatten(), **options).view(4, 5),
        [x, weight],
        [torch.ones(4, 5, device=DEVICE)],
    )
    got = results(
        lambda x, w: linear_cross_entropy(x, w, target, backend="triton", chunk_bytes=4000, **options),
        [x, transposed],
        [torch.ones(4, 5, device=DEVICE)],
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck_of_the_plain_form(options):
    x, weight, target = inputs(5, 3, 7, torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, w: plain(a, w, None, target, **options), (x.requires_grad_(), weight.requires_grad_())
    )
    split = {**options, "backward": "split", "backend": "reference", "chunk_bytes": 60}
    assert torch.autograd.gradcheck(lambda a, w: linear_cross_entropy(a, w, target, **split), (x, weight))


@pytest.mark.parametrize("backend", FORMS)
def test_the_upstream_gradient_is_not_one(backend):
    for dtype in DTYPES:
        x, weight, target = inputs(dtype=dtype)
        x.requires_grad_()
        weight.requires_grad_()
        loss = linear_cross_entropy(x, weight, target, backend=backend, chunk_bytes=3000)
        once = torch.autograd.grad(loss, (x, weight))
        loss = linear_cross_entropy(x, weight, target, backend=backend, chunk_bytes=3000)
        thrice = torch.autograd.grad(loss * 4, (x, weight))
        for a, b in zip(once, thrice, strict=True):
            torch.testing.assert_close(a * 4, b)


@pytest.mark.parametrize("backend", FORMS)
def test_float16_gradients_do_not_vanish_in_the_mean(backend):
    x, weight, _ = inputs(64, 8, 30000, torch.float16)
    target = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    weight = weight / 64
    x, weight = x.requires_grad_(), weight.detach().requires_grad_()
    scaled = linear_cross_entropy(x, weight, target, backend=backend) * 2.0**14
    scaled.backward()
    exact = results(
        lambda x, w: plain(x, w, None, target),
        [x.double(), weight.double()],
        [torch.full((), 2.0**14, device=DEVICE)],
    )
    for got, want in ((x.grad, exact[1]), (weight.grad[1:], exact[2][1:])):
        assert (got.double() - want).abs().max() < 4e-3 * want.abs().max()


@pytest.mark.parametrize("backend", FORMS)
def test_two_backwards(backend):
    x, weight, target = inputs(dtype=torch.bfloat16)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target, backend=backend)
    first = torch.autograd.grad(loss * 2, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 2, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for backward, error in (("fused", True), ("split", False)):
        leaf = weight.detach().float().requires_grad_()
        loss = linear_cross_entropy(x.float(), leaf, target, backend=backend, backward=backward)
        loss.backward(retain_graph=True)
        if error:
            with pytest.raises(KernelError, match="handed out by its first backward"):
                loss.backward()
        else:
            once = leaf.grad.clone()
            loss.backward()
            torch.testing.assert_close(leaf.grad, 2 * once)


@pytest.mark.parametrize("backward", ["fused", "split"])
def test_a_weight_whose_gradient_is_float32(backward):
    x, weight, target = inputs(400, dtype=torch.bfloat16)
    weight.requires_grad_()
    weight.grad_dtype = torch.float32
    linear_cross_entropy(x, weight, target, backward=backward, chunk_bytes=5000).backward()
    narrow = weight.detach().clone().requires_grad_()
    linear_cross_entropy(x, narrow, target, backward=backward, chunk_bytes=5000).backward()
    assert weight.grad.dtype == torch.float32 and narrow.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad.bfloat16(), narrow.grad) and not torch.equal(
        weight.grad, narrow.grad.float()
    )


def test_accumulating_in_the_weights_dtype_is_coarser():
    x, weight, target = inputs(400, dtype=torch.bfloat16)
    exact = results(
        lambda w: plain(x.double(), w, None, target), [weight.double()], [torch.ones((), device=DEVICE)]
    )[1]
    error = {}
    for accumulate in ("float32", "weight"):
        leaf = weight.detach().clone().requires_grad_()
        linear_cross_entropy(x, leaf, target, accumulate=accumulate, chunk_bytes=2000).backward()
        assert leaf.grad.dtype == torch.bfloat16
        error[accumulate] = (leaf.grad - exact).abs().mean()
    assert error["float32"] < error["weight"] < 20 * error["float32"]


class Largest(TorchDispatchMode):
    """Records the largest result of any operation and counts matrix products."""

    largest, products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.addmm_,
        )
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return out


@pytest.mark.parametrize(
    ("needed", "products"),
    [(Needed(), 1), (Needed(x=True), 2), (Needed(weight=True), 2), (Needed(x=True, weight=True), 3)],
)
def test_memory_is_bounded_and_only_what_is_needed_is_computed(needed, products):
    x, weight, target = inputs(64, 8, 500)
    tensors = (x, weight, None, target)
    loss = LossOptions(-100).arguments()
    scan = {"statistic": PLAIN, "chunk_rows": 4, "triton": False, "sum_dtype": torch.float32}
    execution = Execution(4, triton=False, sum_dtype=torch.float32, grad_dtype=torch.float32).arguments()
    fused = {"mean": True, "logits_in_gradient": False, "compiling": False}
    with Largest() as seen:
        chunked._linear_loss_fused(*tensors, **loss, **needed.arguments(), **execution, **fused)
    assert seen.products == 16 * products
    assert seen.largest <= max(500 * 8, 4 * 500) < 64 * 500
    *_, stats = chunked._linear_scan(*tensors, **loss, **scan, grad_dtype=torch.float32)
    upstream = torch.ones(2, 64, device=DEVICE)
    with Largest() as seen:
        chunked._linear_scan_backward(*tensors, stats, upstream, **loss, **scan, **needed.arguments())
    assert seen.products == 16 * products and seen.largest <= 500 * 8


def test_no_gradient_is_computed_where_none_is_needed(monkeypatch):
    seen = []
    fused = autograd.linear_loss_fused

    def recorded(*tensors, **options):
        seen.append(Needed(options["need_x"], options["need_weight"], options["need_bias"]))
        return fused(*tensors, **options)

    monkeypatch.setattr(autograd, "linear_loss_fused", recorded)
    x, weight, target = inputs()
    linear_cross_entropy(x, weight, target)
    with torch.no_grad():
        linear_cross_entropy(x.requires_grad_(), weight, target)
    assert not seen
    loss = linear_cross_entropy(x, weight, target)
    loss.backward()
    assert seen == [Needed(x=True)] and x.grad is not None and weight.grad is None


def test_chunks_are_even_and_within_the_limit():
    assert chunk_rows(8192, 128256, 2, 512 << 20) == 2048
    assert chunk_rows(100, 128256, 2, 512 << 20) == 100
    assert chunk_rows(0, 10, 2, 1) == 1 and chunk_rows(9, 10, 2, 1) == 1
    assert chunk_rows(2500, 32000, 2, 64 << 20) == 896
    for tokens in (5000, 9000, 16384):
        rows = chunk_rows(tokens, 32000, 2, 64 << 20)
        assert rows * 64000 <= 64 << 20 and -(-tokens // rows) == -(-tokens // 1024)


@pytest.mark.parametrize("backend", FORMS)
def test_forward_and_both_gradients_as_three_calls(backend):
    x, weight, target = inputs(30)
    x, target = x.view(5, 6, -1), target.view(5, 6)
    common = {"bias": weight[:, 1].clone(), "label_smoothing": 0.1, "softcap": 4.0, "z_loss": 1e-3}
    how = {"backend": backend, "chunk_bytes": 4000}
    dloss = torch.rand(5, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses, stats = linear_cross_entropy_forward(x, weight, target, **common, **how)
    dx = linear_cross_entropy_input_grad(x, weight, target, stats, dloss, **common, **how)
    dw = linear_cross_entropy_weight_grad(x, weight, target, stats, dloss, **common, **how)
    bias = common.pop("bias")
    want = results(
        lambda x, w: plain(x.flatten(0, 1), w, bias, target.flatten(), reduction="none", **common).view(5, 6),
        [x, weight],
        [dloss],
    )
    for a, b in zip((losses, dx, dw), want, strict=True):
        torch.testing.assert_close(a, b)
    buffer = torch.ones(weight.numel() + 8, device=DEVICE)
    view = buffer[8:].view_as(weight)
    out = linear_cross_entropy_weight_grad(
        x, weight, target, stats, dloss, out=view, bias=bias, **common, **how
    )
    assert out is view and (buffer[:8] == 1).all()
    torch.testing.assert_close(view - 1, dw, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "ignore_index": 5}], ids=str)
def test_log_probabilities_and_entropies(backend, dtype, options):
    x, weight, target = inputs(dtype=dtype)
    target = torch.where(target == -100, options.get("ignore_index", -100), target)
    upstream = [torch.rand(11, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in (1, 2)]
    # p log p is summed in another order than eager's
    assert_no_less_exact(
        lambda x, w: linear_log_probs(
            x, w, target, entropy=True, backend=backend, chunk_bytes=1500, **options
        ),
        lambda x, w: reference.linear_log_probs(x, w, target, **options),
        [x, weight],
        upstream,
        floor=[0.0, 4 * torch.finfo(torch.float32).eps, 0.0, 0.0],
    )
    assert torch.equal(
        linear_log_probs(x, weight, target, backend=backend, **options) == 0,
        target == options.get("ignore_index", -100),
    )


def test_entropy_of_a_masked_vocabulary():
    x, weight, target = inputs(3, 4, 4300)  # the masked ones share lanes with others
    target = target.clamp(max=4199)
    bias = torch.zeros(4300, device=DEVICE)
    bias[4200:] = -float("inf")
    for backend in FORMS:
        got = results(
            lambda x, w, backend=backend: linear_log_probs(
                x, w, target, bias=bias, entropy=True, backend=backend
            ),
            [x, weight],
            [torch.ones(3, device=DEVICE)] * 2,
        )
        want = results(
            lambda x, w: reference.linear_log_probs(x, w[:4200], target),
            [x, weight],
            [torch.ones(3, device=DEVICE)] * 2,
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_autocast_casts_as_torch_does():
    x, weight, target = inputs()
    leaf = weight.clone().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = linear_cross_entropy(x, leaf, target)
        want = F.cross_entropy(F.linear(x, weight).float(), target)
    loss.backward()
    torch.testing.assert_close(loss, want)
    assert leaf.grad.dtype == torch.float32


def test_the_same_run_twice_is_the_same():
    x, weight, target = inputs(200, 8, 300, torch.bfloat16)
    runs = [
        results(
            lambda x, w: linear_cross_entropy(x, w, target, backend="triton", chunk_bytes=50000),
            [x, weight],
            [torch.ones((), device=DEVICE)],
        )
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_ops_are_clean_for_the_compiler():
    x, weight, target = inputs()
    a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    smooth, needed = LossOptions(-100, label_smoothing=0.1).arguments(), Needed(x=True, weight=True)
    execution = Execution(4, triton=True, sum_dtype=torch.float32, grad_dtype=torch.float32).arguments()
    fused = {"mean": True, "logits_in_gradient": False, "compiling": True}
    options = {**smooth, **needed.arguments(), **execution, **fused}
    torch.library.opcheck(autograd.linear_loss_fused, (a, w, None, target), options)
    options = {**LossOptions(-100).arguments(), "statistic": ENTROPY, **execution}
    torch.library.opcheck(autograd.linear_scan, (a, w, None, target), options)
    stats, upstream = torch.ones(4, 11, device=DEVICE), torch.ones(2, 11, device=DEVICE)
    options = {**smooth, "statistic": LOGIT_SUM, "chunk_rows": 4, "triton": True}
    added = (x, weight, None, target, stats, upstream, torch.zeros_like(weight))
    torch.library.opcheck(chunked.linear_add_weight_grad, added, options)
    options = {**options, "sum_dtype": torch.float32, **needed.arguments()}
    torch.library.opcheck(chunked.linear_scan_backward, (x, weight, None, target, stats, upstream), options)

    for backward in ("fused", "split"):

        def step(x, w, backward=backward):
            loss = linear_cross_entropy(
                x * 1, w, target, backend="triton", backward=backward, chunk_bytes=2000
            )
            return loss * 2 + linear_log_probs(x, w, target, entropy=True, backend="triton")[1].sum()

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        one = [torch.ones((), device=DEVICE)]
        for got, want in zip(
            results(compiled, [x, weight], one), results(step, [x, weight], one), strict=True
        ):
            torch.testing.assert_close(got, want)


def test_errors_name_the_argument():
    x, weight, target = inputs()
    for wrong, said in (
        ({"reduction": "avg"}, "unknown reduction"),
        ({"backward": "lazy"}, "unknown backward"),
        ({"accumulate": "float64"}, "unknown accumulate"),
        ({"backward": "fused", "reduction": "none"}, "before it knows"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"bias": weight[:5, 0]}, "bias does not fit"),
        ({"backend": "fast"}, "unknown backend"),
    ):
        with pytest.raises(KernelError, match=said):
            linear_cross_entropy(x, weight, target, **wrong)
    with pytest.raises(TypeError, match="chunks"):
        linear_cross_entropy(x, weight, target, chunks=3)
    with pytest.raises(KernelError, match="weight has an unsupported dtype"):
        linear_cross_entropy(x, weight.half(), target)
    with pytest.raises(KernelError, match="weight does not fit x"):
        linear_cross_entropy(x, weight.t(), target)
    with pytest.raises(KernelError, match="target does not fit"):
        linear_log_probs(x, weight, target[1:])
    stats, dloss = torch.ones(4, 11, device=DEVICE), torch.ones(11, device=DEVICE)
    with pytest.raises(KernelError, match="dloss does not fit"):
        linear_cross_entropy_input_grad(x, weight, target, stats, dloss[:3])
    with pytest.raises(KernelError, match="stats do not fit"):
        linear_cross_entropy_input_grad(x, weight, target, stats[:, :9], dloss)
    with pytest.raises(KernelError, match="out does not fit"):
        linear_cross_entropy_weight_grad(x, weight, target, stats, dloss, out=weight[1:])
