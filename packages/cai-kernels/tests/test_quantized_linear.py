"""Weights in 4 and 8 bits: bitsandbytes' bits, and the products and gradients of the weight in full."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, DTYPES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from cai_kernels import (
    KernelError,
    QuantizedLinear,
    dequantize,
    planning_for,
    quantize,
    quantized_linear,
)
from cai_kernels.quantized_linear import check_features, kind_fits, operators, reference, triton

KINDS = ["nf4", "int8"]
BACKENDS = ["reference", "triton"]
FORMS = {"reference": None, "tiles": 1 << 30, "memory": 0}
"""The forms of a product, by the most rows that take tiles."""

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3, torch.float64: 1e-14}


@pytest.fixture(params=list(FORMS))
def backend(request, monkeypatch):
    """A backend whose products take one form, however many rows they have."""
    if request.param == "reference":
        return "reference"
    monkeypatch.setattr(triton, "FEW_ROWS", dict.fromkeys(triton.FEW_ROWS, FORMS[request.param]))
    return "triton"


def values(*shape, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random).to(DEVICE, dtype)


def twin(codes, scales, kind):
    """The weight in float64, number by number in plain Python."""
    codes, scales = codes.tolist(), scales.tolist()
    if kind == "int8":
        rows = [[code * scale[0] for code in row] for row, scale in zip(codes, scales, strict=True)]
    else:
        levels = [[reference.LEVELS[half] for byte in row for half in divmod(byte, 16)] for row in codes]
        rows = [
            [level * scale[at // 64] for at, level in enumerate(row)]
            for row, scale in zip(levels, scales, strict=True)
        ]
    return torch.tensor(rows, dtype=torch.float64, device=DEVICE)


def nf4_edges():
    """A pattern, all levels, the numbers where codes change and their neighbours, in three scales, and zeros."""
    at = torch.arange(128)
    pattern = ((at * at * 37 + at * 11) % 257 - 128) * (1 + at // 64) / 96
    levels = torch.tensor(reference.LEVELS)
    between = (levels[:-1] + levels[1:]) / 2
    above, below = (between.nextafter(torch.tensor(far)) for far in (2.0, -2.0))
    edges = torch.cat((levels, between, above, below, torch.zeros(3)))
    return torch.stack((pattern, torch.cat((edges, edges / 3)), torch.cat((edges * 3, torch.zeros(64)))))


PUBLISHED = (
    "01b56d6480ee2ed0845d65a1f06103ebd2ee1b7b0dd0a6a0dd0b7b1ee2dbe301"
    "60f1a56d5480de2ee0846d65b1017115ede3ff2dad1ee1c9c1ee2dbe3004fe07"
    "0123456789abcdef0123456789abcde123456789abcdef0123456789abcde777"
    "0123456789abcdef0123456789abcde0234467899bcdef0123456789abcde777"
    "0123456789abcdef0123456799accdf123356789abcdef0123456789abcde777"
    "7777777777777777777777777777777777777777777777777777777777777777"
)
"""The bytes that bitsandbytes 0.50.2 gave for `nf4_edges()` on a CPU: `quantize_4bit(weight, blocksize=64,
compress_statistics=False, quant_type="nf4")`."""


@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_nf4_has_the_bits_of_bitsandbytes(at_once, monkeypatch):
    monkeypatch.setattr(reference, "AT_ONCE", at_once)
    codes, scales = quantize(nf4_edges().to(DEVICE), "nf4")
    assert bytes(codes.flatten().tolist()).hex() == PUBLISHED
    assert scales.tolist() == [
        [1.3333333730697632, 2.6666667461395264],
        [1.0, 0.3333333432674408],
        [3.0, 0.0],
    ]
    first = [-1.3333333730697632, -0.9282571077346802, 0.45055365562438965, -0.24636457860469818]
    for backend in BACKENDS:  # as its `dequantize_4bit` gave
        assert dequantize(codes, scales, "nf4", torch.float32, backend=backend)[0, :4].tolist() == first


def test_int8_is_the_nearest_of_255_numbers():
    weight = values(5, 33)
    weight[2] = 0
    codes, scales = quantize(weight, "int8")
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (
        torch.int8,
        (5, 33),
        torch.float32,
        (5, 1),
    )
    assert scales.tolist() == [[row.abs().max().item()] for row in (weight / torch.full_like(weight, 127.0))]
    assert (codes.abs().amax(1) == torch.tensor([127, 127, 0, 127, 127], device=DEVICE)).all()
    assert ((codes * scales - weight).abs() <= scales * 0.5001).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_what_was_quantized_is_quantized_to_the_same(dtype, kind):
    codes, scales = quantize(values(7, 192, dtype=dtype).t().contiguous().t(), kind)
    again = quantize(dequantize(codes, scales, kind, torch.float32), kind)
    assert torch.equal(again[0], codes)
    torch.testing.assert_close(again[1], scales, rtol=2e-7, atol=0)  # 127 / 127 may not be 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(3, 64), (5, 4160), (1, 192)])
def test_a_weight_in_full_is_rounded_once(shape, dtype, kind, backend):
    codes, scales = quantize(values(*shape), kind)
    got = dequantize(codes, scales, kind, dtype, backend=backend)
    assert torch.equal(got, twin(codes, scales, kind).float().to(dtype))


CASES = {
    "one": (1, 64, 5),
    "some": (2, 9, 192, 66),
    "none": (0, 3, 64, 7),
    "vector": (128, 33),
    "more": (35, 128, 33),
}


def case(name, kind, dtype):
    *leading, inputs, outputs = CASES[name]
    inputs -= 5 if kind == "int8" else 0  # no multiple of anything
    stored = quantize(values(outputs, inputs, seed=1) / inputs**0.5, kind)
    return values(*leading, inputs, dtype=dtype), stored, values(outputs, dtype=dtype, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(CASES))
def test_products_are_those_of_the_weight_in_full(name, kind, dtype, backend):
    x, stored, b = case(name, kind, dtype)
    bias = None if name == "more" else b
    got = quantized_linear(x, *stored, bias, kind=kind, backend=backend)
    weight = dequantize(*stored, kind, dtype)
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous()
    error = (got.double() - want).abs().max().item() if got.numel() else 0.0
    largest = want.abs().max().item() if got.numel() else 0.0
    assert error <= TOLERANCE[dtype] * (1 + largest) + torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_a_twin_in_float64(kind, dtype, backend):
    x, stored, b = case("some", kind, dtype)
    weight = dequantize(*stored, kind, dtype).double()
    leaves, exact = (
        [t.requires_grad_() for t in (x, b)],
        [t.detach().double().requires_grad_() for t in (x, b)],
    )
    y = quantized_linear(leaves[0], *stored, leaves[1], kind=kind, backend=backend)
    upstream = values(66, 9, 2, dtype=dtype, seed=3).permute(2, 1, 0)  # strides that no product has
    wanted = torch.autograd.grad(F.linear(exact[0], weight, exact[1]), exact, upstream.double())
    for got, want in zip(torch.autograd.grad(y, leaves, upstream), wanted, strict=True):
        assert got.dtype == dtype
        scale = want.abs().max().item()
        assert (got.double() - want).abs().max() <= (TOLERANCE[dtype] + torch.finfo(dtype).eps) * scale


def test_gradients_are_only_made_where_they_are_needed(backend):
    x, stored, b = case("some", "nf4", torch.float32)
    y = quantized_linear(x, *stored, b.requires_grad_(), kind="nf4", backend=backend)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), b)[0], torch.full_like(b, 18.0))
    assert not quantized_linear(x, *stored, kind="nf4", backend=backend).requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_only_codes_and_scales_are_kept_for_backward(kind, backend):
    x, (codes, scales), b = case("some", kind, torch.bfloat16)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        quantized_linear(x.requires_grad_(), codes, scales, b.requires_grad_(), kind=kind, backend=backend)
    assert {t.data_ptr() for t in packed} == {codes.data_ptr(), scales.data_ptr()}


@pytest.mark.parametrize("kind", KINDS)
def test_strided_inputs(kind, backend):
    x, (codes, scales), b = case("more", kind, torch.float32)
    want = quantized_linear(x, codes, scales, b, kind=kind, backend="reference")
    views = [torch.cat((x, x), -1)[:, x.shape[1] :], x.t().contiguous().t()]
    apart = [torch.stack((t, t), -1)[..., 0] for t in (codes, scales, b)]
    for view in views:
        torch.testing.assert_close(quantized_linear(view, *apart, kind=kind, backend=backend), want)


def test_gradients_of_gradients(backend):
    x, stored, b = case("one", "nf4", torch.float32)
    weight, penalties = dequantize(*stored, "nf4", torch.float32), []
    for function in (
        lambda x, b: quantized_linear(x, *stored, b, kind="nf4", backend=backend),
        lambda x, b: F.linear(x, weight, b),
    ):
        leaves = [t.detach().clone().requires_grad_() for t in (x, b)]
        first = torch.autograd.grad((function(*leaves) ** 3).sum(), leaves, create_graph=True)
        penalties.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    torch.testing.assert_close(*penalties, rtol=1e-4, atol=1e-4)


def test_float64_goes_through_the_reference():
    x, stored, _ = case("one", "nf4", torch.float64)
    want = F.linear(x, dequantize(*stored, "nf4", torch.float32).double())
    torch.testing.assert_close(quantized_linear(x, *stored, kind="nf4"), want, rtol=1e-14, atol=1e-14)
    with pytest.raises(KernelError, match="x has an unsupported dtype"):
        quantized_linear(x, *stored, kind="nf4", backend="triton")


def test_autocast_casts_the_input(backend):
    x, stored, b = case("one", "nf4", torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = quantized_linear(x, *stored, b, kind="nf4", backend=backend)
        double = quantized_linear(x.double(), *stored, b, kind="nf4", backend="reference")
    want = quantized_linear(x.bfloat16(), *stored, b.bfloat16(), kind="nf4", backend=backend)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want) and double.dtype == torch.float64


def test_few_rows_make_the_weight_in_tiles():
    assert [triton.takes_tiles(n, torch.bfloat16, "int8") for n in (1, 256, 257)] == [True, True, False]
    assert [triton.takes_tiles(n, torch.bfloat16, "nf4") for n in (1, 48, 49)] == [True, True, False]
    assert [triton.takes_tiles(n, torch.float32, "nf4") for n in (32, 33)] == [True, False]


def test_a_product_takes_the_form_for_its_rows(monkeypatch):
    forms, calls = {name: getattr(triton, name) for name in ("in_tiles", "in_memory")}, []
    for name, form in forms.items():
        monkeypatch.setattr(triton, name, lambda *a, name=name, form=form: calls.append(name) or form(*a))
    x, stored, _ = case("one", "nf4", torch.float32)
    for rows in (32, 33):
        quantized_linear(x.expand(rows, -1), *stored, kind="nf4", backend="triton")
    assert calls == ["in_tiles", "in_memory"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", BACKENDS)
def test_the_ops_are_clean_for_the_compiler(form, kind):
    x, stored, b = case("one", kind, torch.float32)
    on, leaves = form == "triton", (x.requires_grad_(), b.requires_grad_())
    torch.library.opcheck(operators.quantized_linear, (leaves[0], *stored, leaves[1], kind, on))
    torch.library.opcheck(operators.quantized_linear, (leaves[0], *stored, None, kind, on))
    upstream = values(2, 5).requires_grad_()
    torch.library.opcheck(operators.quantized_linear_backward, (upstream, *stored, kind, on))
    torch.library.opcheck(operators.dequantize_weight, (*stored, kind, torch.bfloat16, on))

    def function(x, b):
        return quantized_linear(x, *stored, b, kind=kind, backend=form) * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), function(*leaves))


def test_a_plan_keeps_codes_and_no_weight():
    with FakeTensorMode(), planning_for(torch.device("cuda")):
        layer = QuantizedLinear(4096, 4096, kind="nf4")
        x = torch.empty(2, 4096, dtype=torch.bfloat16, requires_grad=True)
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            y = layer(x)
        assert (y.shape, y.dtype) == ((2, 4096), torch.bfloat16)
        assert {t.dtype for t in packed} == {torch.uint8, torch.float32}
        y.sum().backward()
        assert x.grad.shape == x.shape
        reference.levels.cache_clear()
        reference.levels(torch.device(DEVICE))
    assert reference.levels(torch.device(DEVICE)).tolist() == list(reference.LEVELS)


def test_kinds_fit_by_their_inputs():
    assert kind_fits(128, 3, "nf4") and not kind_fits(96, 64, "nf4") and kind_fits(95, 3, "int8")
    assert not kind_fits(0, 3, "nf4") and not kind_fits(64, 0, "int8")
    check_features(64, 1, "nf4")
    with pytest.raises(KernelError, match="cannot be stored in nf4") as refusal:
        check_features(96, 32, "nf4")
    assert "96 inputs and 32 outputs" in str(refusal.value) and "multiple of 64" in str(refusal.value)
    with pytest.raises(KernelError, match="unknown kind"):
        kind_fits(64, 64, "fp4")


def test_errors_of_quantize_name_the_argument():
    weight = values(3, 64)
    for number in (torch.nan, torch.inf, -torch.inf):
        for kind in KINDS:
            wrong = weight.clone()
            wrong[1, 7] = number
            with pytest.raises(KernelError, match="weight is not finite") as refusal:
                quantize(wrong, kind)
            assert "in row 1" in str(refusal.value)
    with pytest.raises(KernelError, match="weight is not finite"):
        quantize(weight.double() * 1e300, "nf4")
    with pytest.raises(KernelError, match="weight has an unsupported dtype"):
        quantize(weight.int(), "nf4")
    with pytest.raises(KernelError, match="weight has another number of dims"):
        quantize(weight[0], "nf4")
    with pytest.raises(KernelError, match="cannot be stored in nf4"):
        quantize(weight[:, :63], "nf4")
    with pytest.raises(KernelError, match="unknown kind"):
        quantize(weight, "fp4")


def test_errors_of_products_name_the_argument():
    x, (codes, scales), b = case("one", "nf4", torch.float32)

    def refused(said, *arguments, kind="nf4", **options):
        with pytest.raises(KernelError, match=said):
            quantized_linear(*arguments, kind=kind, **options)

    refused("unknown kind", x, codes, scales, kind="fp4")
    refused("unknown backend", x, codes, scales, backend="fast")
    refused("codes has an unsupported dtype", x, codes, scales, kind="int8")
    refused("codes has an unsupported dtype", x, x, scales)
    refused("codes is on another device", x, codes.to("meta"), scales.to("meta"))
    refused("codes have another number of dims", x, codes[0], scales)
    refused("cannot be stored in nf4", x, codes[:, :31], scales)
    refused("scales has an unsupported dtype", x, codes, scales.half())
    refused("scales do not fit codes", x, codes, scales[:2])
    refused("scales do not train", x, codes, scales.clone().requires_grad_())
    refused("x does not fit codes", x[:, :63], codes, scales)
    refused("x has an unsupported dtype", x.int(), codes, scales)
    refused("bias has an unsupported dtype", x, codes, scales, b.int())
    refused("bias does not fit codes", x, codes, scales, b[:3])
    refused("bias is on another device", x, codes, scales, b.to("meta"))
    with pytest.raises(KernelError, match="unsupported dtype"):
        dequantize(codes, scales, "nf4", torch.int32)
