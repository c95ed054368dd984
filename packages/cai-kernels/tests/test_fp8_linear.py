"""FP8 linear layers: casts bit for bit, products to float32's rounding, gradients, the weight's cache, training."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from kernel_checks import DEVICE
from torch import nn
from torch.nn import functional as F

from cai_kernels import Fp8Linear, KernelError, WeightCache, fp8_linear
from cai_kernels.fp8_linear import Fp8Products, checks, quantized, reference, weight_cache
from cai_kernels.fp8_linear.reference import BLOCK, ROW, SQUARE, TENSOR

SCALINGS = ["tensor", "row", "block"]
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
# Hopper's tensor cores align 32 products and their sum so far to the largest and cut what is below 2^-13 of it
# (DeepSeek-V3, arXiv:2412.19437, section 3.5.2); of the largest of all results no more than this is lost
CUT = 2.0**-9 if DEVICE == "cuda" else 0.0
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def random(*shape, seed=0, dtype=torch.bfloat16):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def by_hand(t, scaling, dtype):
    """What a scaled cast stands for, in float64, group by group."""
    out = torch.zeros(t.shape, dtype=torch.float64, device=t.device)
    down, across = {TENSOR: t.shape, ROW: (1, t.shape[1]), BLOCK: (1, 128), SQUARE: (128, 128)}[scaling]
    limit = torch.tensor(torch.finfo(dtype).max, device=t.device)
    for i in range(0, t.shape[0], down):
        for j in range(0, t.shape[1], across):
            group = t[i : i + down, j : j + across].float()
            largest = group.abs().max()
            if largest == 0:
                continue
            q = (group * (limit / largest)).to(dtype)
            out[i : i + down, j : j + across] = q.double() * (largest / limit).double()
    return out


@pytest.mark.parametrize("shape", [(70, 144), (1, 16), (260, 48)])
@pytest.mark.parametrize("scaling", [TENSOR, ROW, BLOCK, SQUARE])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])  # a kernel of its own each
def test_casts_are_the_same_bits_and_what_they_stand_for(shape, scaling, dtype, source):
    t = random(*shape, dtype=source) * 7
    t[0, 3:9] = torch.tensor([1e-3, -2e-4, 0.0, 3e-5, 1e-6, -1e-2])  # below the smallest normal numbers
    if shape[0] > 40:
        t[40] = 0
    want = quantized.fp8_cast(t, scaling, dtype, True, False)
    got = quantized.fp8_cast(t, scaling, dtype, True, True)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a.float(), b.float())
    exact, turned = by_hand(t, scaling, dtype), by_hand(t.t(), scaling, dtype)
    torch.testing.assert_close(reference.widen(*want[:2]).double(), exact, rtol=1e-6, atol=0)
    padded = reference.widen(*want[2:])
    torch.testing.assert_close(padded[:, : shape[0]].double(), turned, rtol=1e-6, atol=0)
    assert not padded[:, shape[0] :].any()
    plain = quantized.fp8_cast(t, scaling, dtype, False, True)
    assert torch.equal(plain[0].float(), want[0].float()) and not plain[2].numel()


@pytest.mark.parametrize("square", [BLOCK, SQUARE])
@pytest.mark.parametrize("shape", [(70, 48, 272), (1, 16, 16), (150, 144, 128), (20, 24, 200)])
def test_product_of_blocks(shape, square):
    from cai_kernels.fp8_linear import triton

    m, n, k = shape
    a = reference.cast(random(m, k), BLOCK, TYPES[0], False)
    b = reference.cast(random(n, k, seed=1), square, TYPES[0], False)
    want = reference.widen(a.matrix, a.scale).double() @ reference.widen(b.matrix, b.scale).double().t()
    got = triton.block_matmul(a.matrix, a.scale, b.matrix, b.scale, torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 + CUT * want.abs().max().item())


def gradients(fn, *leaves, dy):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    y = fn(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("tokens", [(5, 7), (160,)])
def test_layer_and_gradients_are_products_of_casts(tokens, scaling, dtype):
    x, weight, bias = (
        random(*tokens, 144, dtype=dtype),
        random(48, 144, seed=1, dtype=dtype),
        random(48, seed=2),
    )
    dy = random(*tokens, 48, seed=3, dtype=dtype)
    bias = bias.to(dtype)
    kind = checks.SCALINGS[scaling]
    square, gradient_type = (SQUARE if kind == BLOCK else kind), TYPES[1] if kind == TENSOR else TYPES[0]
    flat, flat_dy = x.flatten(0, -2), dy.flatten(0, -2)
    want = [
        (by_hand(flat, kind, TYPES[0]) @ by_hand(weight, square, TYPES[0]).t())
        .to(dtype)
        .add(bias)
        .view(dy.shape),
        (by_hand(flat_dy, kind, gradient_type) @ by_hand(weight.t(), square, TYPES[0]).t()).view(x.shape),
        by_hand(flat_dy.t(), kind, gradient_type) @ by_hand(flat.t(), kind, TYPES[0]).t(),
        flat_dy.sum(0),
    ]
    for backend in ("triton", "reference"):
        how = {"scaling": scaling, "backend": backend, "fast_accumulate": False}
        got = gradients(lambda *a, how=how: fp8_linear(*a, **how), x, weight, bias, dy=dy)
        # cuBLAS gives products with scales of rows in bfloat16 only
        narrow = torch.bfloat16 if scaling == "row" and DEVICE == "cuda" else dtype
        for g, w in zip(got, want, strict=True):
            assert g.dtype == dtype
            # the product is rounded, and so is its sum with the bias; up to 160 terms are summed in float32
            rounding = 2 * torch.finfo(narrow).eps + 160**0.5 * torch.finfo(torch.float32).eps
            rounding += CUT if backend == "triton" else 0.0
            error, allowed = (g.double() - w.double()).abs().max(), rounding * w.abs().max()
            assert error <= allowed, (error, allowed)
    close = gradients(F.linear, x, weight, bias, dy=dy)
    for g, w in zip(got, close, strict=True):
        assert (g - w).float().norm() < 0.08 * w.float().norm()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_autocast_changes_no_product(scaling):
    x, weight, dy = random(20, 32), random(16, 32, seed=1), random(20, 16, seed=2)
    for backend in ("triton", "reference"):
        run = lambda *a, b=backend: gradients(  # noqa: E731
            lambda x, w: fp8_linear(x, w, scaling=scaling, backend=b), *a, dy=dy
        )
        plain = run(x, weight)
        with torch.autocast(DEVICE, torch.bfloat16):
            cast = run(x, weight)
        assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_empty_and_strided():
    weight = random(32, 48)
    for backend in ("triton", "reference"):
        got = gradients(
            lambda x, w, b=backend: fp8_linear(x, w, backend=b), random(0, 48), weight, dy=random(0, 32)
        )
        assert [tuple(g.shape) for g in got] == [(0, 32), (0, 48), (32, 48)] and not got[2].any()
        x = random(48, 20).t()
        assert torch.equal(
            fp8_linear(x, weight, backend=backend), fp8_linear(x.contiguous(), weight, backend=backend)
        )
        spread = random(48, 32).t()
        assert torch.equal(
            fp8_linear(x, spread, backend=backend), fp8_linear(x, spread.contiguous(), backend=backend)
        )


def test_the_weight_is_cast_once_a_step(monkeypatch):
    casts = []
    plainly = weight_cache.cast_weight
    monkeypatch.setattr(weight_cache, "cast_weight", lambda w, *a: casts.append(w) or plainly(w, *a))
    layer = Fp8Linear(32, 16, bias=False, device=DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = random(4, 32, dtype=torch.float32)
    for step in range(1, 4):
        for _ in range(3):
            y = layer(x)
            y.square().sum().backward()
        assert len(casts) == step
        torch.testing.assert_close(
            y, fp8_linear(x, layer.weight.detach().clone(), weight_cache=WeightCache())
        )
        casts.pop()  # the comparison's
        optimizer.step()
    cache, one, other = WeightCache(), random(16, 32), random(16, 32, seed=1)
    cast = cache.get(one, TENSOR, False)
    assert cache.get(one, TENSOR, False) is cast and cache.get(other, TENSOR, False) is not cast
    cast = cache.get(one, TENSOR, False)
    one.data.mul_(2)  # as a gather of shards writes: without a trace
    stepped = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([stepped], lr=0.1).step()
    fresh = cache.get(one, TENSOR, False)
    assert fresh is not cast and not torch.equal(fresh.scale, cast.scale)
    assert cache.get(one, TENSOR, False) is fresh
    cache.clear()
    assert cache.get(one, TENSOR, False) is not fresh
    assert not copy.deepcopy(cache)._cast and not pickle.loads(pickle.dumps(cache))._cast


def test_layer_keeps_names_and_parameters():
    linear = nn.Linear(32, 16, device=DEVICE, dtype=torch.bfloat16)
    layer = Fp8Linear.from_linear(linear, scaling="row")
    assert layer.weight is linear.weight and layer.bias is linear.bias and "scaling=row" in repr(layer)
    assert list(layer.state_dict()) == ["weight", "bias"]
    x = random(3, 32)
    assert torch.equal(layer(x), fp8_linear(x, linear.weight, linear.bias, scaling="row"))
    with torch.autocast(DEVICE, torch.bfloat16):
        assert Fp8Linear(32, 16, device=DEVICE)(x.float()).dtype == torch.bfloat16


def test_only_what_is_wanted_is_computed(monkeypatch):
    products = []
    plainly = quantized.matmul
    monkeypatch.setattr(quantized, "matmul", lambda *a: products.append(a[0].shape) or plainly(*a))
    x, weight = random(20, 32), random(16, 32, seed=1)
    for x_needs, w_needs, count in ((True, True, 3), (True, False, 2), (False, True, 2)):
        products.clear()
        fp8_linear(x.clone().requires_grad_(x_needs), weight.clone().requires_grad_(w_needs)).sum().backward()
        assert len(products) == count
    products.clear()
    options = {"scaling": TENSOR, "triton": False, "fast": True, "keep_x": False}
    cast = weight_cache.cast_weight(weight, TENSOR, triton=False)
    _, kept, _ = quantized.fp8_linear(x, weight, None, *cast, **options)
    assert len(products) == 1 and not kept.numel()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_training_stays_close_to_bfloat16(scaling):
    def train(wrap) -> tuple[float, float]:
        torch.manual_seed(0)
        layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)]
        model = nn.Sequential(*(wrap(m) if isinstance(m, nn.Linear) else m for m in layers)).to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        x = random(256, 16, dtype=torch.float32)
        y = torch.sin(2 * x).roll(1, -1)
        losses = []
        for _ in range(120):
            with torch.autocast(DEVICE, torch.bfloat16):
                out = model(x)
            loss = F.mse_loss(out.float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses[0], losses[-1]

    start, fine = train(lambda m: m)
    _, coarse = train(lambda m: Fp8Linear.from_linear(m, scaling=scaling))
    assert fine < 0.2 * start
    assert abs(coarse - fine) < 0.1 * (start - fine)  # nine tenths of the way


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_ops_are_clean_for_the_compiler(scaling):
    x, weight, dy = random(20, 32), random(16, 32, seed=1), random(20, 16, seed=2)
    kind = checks.SCALINGS[scaling]
    cast = quantized.fp8_cast(weight, quantized.weight_scaling(kind), TYPES[0], True, True)
    tests = (
        "test_autograd_registration",
        "test_faketensor",
    )  # test_schema compares float8, which torch cannot
    torch.library.opcheck(quantized.fp8_cast, (x, kind, TYPES[0], True, True), test_utils=tests)
    options = {"scaling": kind, "triton": True, "fast": True, "keep_x": True}
    arguments = (x.clone().requires_grad_(), weight.clone().requires_grad_(), None, *cast)
    torch.library.opcheck(quantized.fp8_linear, arguments, options, test_utils=tests)

    def step(a, b):
        return fp8_linear(a, b, scaling=scaling, backend="triton", weight_cache=WeightCache()) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        gradients(compiled, x, weight, dy=dy), gradients(step, x, weight, dy=dy), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_the_same_run_twice_is_the_same():
    x, weight, dy = random(100, 32), random(16, 32, seed=1), random(100, 16, seed=2)
    for scaling in SCALINGS:
        runs = [
            gradients(lambda *a, s=scaling: fp8_linear(*a, scaling=s, backend="triton"), x, weight, dy=dy)
            for _ in range(2)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_errors_name_the_argument(monkeypatch):
    x, weight = random(4, 32), random(16, 32)
    for change, said in (
        ({"scaling": "column"}, "unknown scaling"),
        ({"x": x.double()}, "x has an unsupported dtype"),
        ({"weight": weight.int()}, "weight has an unsupported dtype"),
        ({"weight": weight.t()}, "weight does not fit x"),
        ({"weight": weight[:15]}, "FP8 products cannot take"),
        ({"bias": weight[:3, 0]}, "bias does not fit"),
        ({"weight": weight.to("meta")}, "weight is on another device"),
    ):
        with pytest.raises(KernelError, match=said):
            fp8_linear(**{"x": x, "weight": weight, **change})
    monkeypatch.setattr(checks, "capability", lambda _device: (8, 0))
    with pytest.raises(KernelError, match="no FP8 products"):
        checks.check_device(torch.device("cuda"))
    checks.check_device(torch.device("cpu"))


# -- products for whoever runs the layer ---------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(24, 32), (2, 12, 32)], ids=str)
def test_products_are_those_of_the_function(scaling, shape):
    x, weight, bias = random(*shape), random(16, 32, seed=1), random(16, seed=2)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = fp8_linear(*leaves, scaling=scaling)
    dy = random(*y.shape, seed=3)
    expected = torch.autograd.grad(y, leaves, dy)
    products = Fp8Products(scaling)
    got, saved = products.forward(leaves[0].detach(), leaves[1], bias)
    assert torch.equal(got, y)
    dx, operands, db = products.backward(
        dy, weight, saved, needs_input=True, needs_weight=True, needs_bias=True
    )
    assert torch.equal(dx, expected[0]) and torch.equal(db, expected[2])
    dw = products.weight_grad(operands)
    assert torch.equal(dw.to(weight.dtype), expected[1])
    out = torch.full_like(weight, float("nan"), dtype=torch.float32)
    products.write_weight_grad(operands, out, fresh=True)
    torch.testing.assert_close(out, dw.float(), rtol=1e-6, atol=1e-6)
    products.write_weight_grad(operands, out, fresh=False)
    torch.testing.assert_close(out, 2 * dw.float(), rtol=1e-6, atol=1e-6)
    frozen, nothing = products.forward(x, weight, None)
    assert not nothing[0].numel() and torch.equal(frozen + bias, y)
    dx, operands, none = products.backward(
        dy, weight, nothing, needs_input=True, needs_weight=False, needs_bias=False
    )
    assert torch.equal(dx, expected[0]) and operands == () and none is None
    dx, operands, _ = products.backward(
        dy, weight, saved, needs_input=False, needs_weight=True, needs_bias=False
    )
    assert dx is None and torch.equal(products.weight_grad(operands), dw)


def test_layers_that_read_one_input_cast_it_once(monkeypatch):
    casts = []
    plainly = quantized._cast

    def counted(t, *options):
        casts.append(tuple(t.shape))
        return plainly(t, *options)

    monkeypatch.setattr(quantized, "_cast", counted)
    products = Fp8Products()
    weights = [random(16, 32, seed=i).requires_grad_() for i in range(3)]
    for turn in range(2):
        x = random(24, 32, seed=turn)
        results = [products.forward(x, weight, None)[0] for weight in weights]
        assert casts.count((24, 32)) == turn + 1
        for weight, y in zip(weights, results, strict=True):
            assert torch.equal(y, fp8_linear(x, weight))
        del casts[:]
        casts += [(24, 32)] * (turn + 1)
    x.mul_(2)  # in place: other values
    assert torch.equal(products.forward(x, weights[0], None)[0], fp8_linear(x, weights[0]))
    assert products.input_cache._cast is not None
    del x
    assert products.input_cache._cast is None  # nothing is kept for an input that is gone
    assert (
        copy.deepcopy(products) == products
        and copy.deepcopy(products).input_cache is not products.input_cache
    )
