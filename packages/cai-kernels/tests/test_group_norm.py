"""Group norm, alone and with SiLU: no less exact than eager torch, the layout of an image kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, DTYPES, assert_the_same_twice

from cai_kernels import KernelError, group_norm
from cai_kernels.group_norm import reference
from cai_kernels.testing import assert_no_less_exact, results

# groups, and images: channels a group 10 and 5, odd sizes, one value a group, one sample, one group, none, no positions
IMAGES = [
    (2, (2, 20, 7, 5)), (3, (1, 15, 3, 3)), (4, (2, 4, 1, 1)), (1, (1, 12, 9)), (4, (0, 8, 2, 2)), (2, (2, 4, 0)),
]  # fmt: skip
IN_PARTS = [(2, (2, 6, 7, 5)), (1, (1, 5, 9)), (4, (2, 4, 1, 1)), (4, (0, 8, 2, 2)), (2, (2, 4, 0))]
LAYOUTS = ["first", "last"]


def laid(x, layout):
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if layout == "last" else x


def tensors(shape, dtype=torch.float32, layout="first"):
    random = torch.Generator().manual_seed(sum(shape))
    x, dy = (torch.randn(shape, generator=random).to(DEVICE, dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[1], generator=random).to(DEVICE, dtype) / 2 for _ in range(2))
    return [laid(3 + x, layout), 1 + weight, bias, laid(dy, layout)]


def kernel(groups, silu=True):
    return lambda x, w=None, b=None: group_norm(x, groups, w, b, silu=silu, backend="triton")


def plain(groups, silu=True):
    return lambda x, w=None, b=None: reference.group_norm(x, groups, w, b, 1e-5, silu)


def cancelled(groups, x, weight, dy):
    """What the differences in dx leave in float32; in a group of one value they are differences of equals."""
    if not x.numel():
        return 0.0
    spread = x.double().reshape(x.shape[0], groups, -1).var(-1, correction=0).add(1e-5).rsqrt().max()
    return 8 * torch.finfo(torch.float32).eps * (dy.double().abs().max() * weight.abs().max() * spread).item()


@pytest.fixture
def in_parts(monkeypatch):
    """Groups that no program holds, in tiles of 4 channels at most."""
    from cai_kernels.group_norm import triton

    monkeypatch.setattr(triton, "WHOLE", 0)
    monkeypatch.setattr(triton, "TILE", 32)
    monkeypatch.setattr(triton, "CHANNELS", 4)
    monkeypatch.setattr(triton, "JOINED", 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("groups", "shape"), IMAGES)
def test_error_is_no_larger_than_eager(groups, shape, layout, dtype):
    *inputs, dy = tensors(shape, dtype, layout)
    floor = (0.0, cancelled(groups, inputs[0], inputs[1], dy), 0.0, 0.0)
    assert_no_less_exact(kernel(groups), plain(groups), inputs, (dy,), floor=floor)
    assert_no_less_exact(kernel(groups, False), plain(groups, False), inputs, (dy,), floor=floor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("groups", "shape"), IN_PARTS)
def test_a_group_that_no_program_holds(groups, shape, layout, dtype, in_parts):
    *inputs, dy = tensors(shape, dtype, layout)
    floor = (0.0, cancelled(groups, inputs[0], inputs[1], dy), 0.0, 0.0)
    assert_no_less_exact(kernel(groups), plain(groups), inputs, (dy,), floor=floor)
    assert_no_less_exact(kernel(groups, False), plain(groups, False), inputs, (dy,), floor=floor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_the_usual_sizes(layout):
    *inputs, dy = tensors((1, 10, 48, 41), torch.bfloat16, layout)
    floor = (0.0, cancelled(1, inputs[0], inputs[1], dy), 0.0, 0.0)
    assert_no_less_exact(kernel(1), plain(1), inputs, (dy,), floor=floor)


def test_a_large_mean_leaves_the_variance(in_parts):
    x = 1e3 + tensors((1, 4, 20, 3))[0]
    want = F.group_norm(x.double(), 2).float()
    torch.testing.assert_close(kernel(2, False)(x), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", ["whole", "parts"])
def test_the_layout_stays(form, request):
    if form == "parts":
        request.getfixturevalue("in_parts")
    x, weight, bias, dy = tensors((2, 4, 5, 3))
    want = results(plain(2), (x, weight, bias), (dy,))
    wide = torch.cat((x, x), 1)
    cases = {
        "channels last": (x.to(memory_format=torch.channels_last), dy),
        "another gradient": (x.to(memory_format=torch.channels_last), dy.transpose(2, 3).contiguous().mT),
        "gradient last": (x, dy.to(memory_format=torch.channels_last)),
        "expanded gradient": (x, dy),
        "a slice": (wide[:, 4:], dy),
    }
    for name, (given, upstream) in cases.items():
        leaf = given.detach().requires_grad_()
        y = kernel(2)(leaf, weight, bias)
        (dx,) = torch.autograd.grad(y, leaf, upstream)
        torch.testing.assert_close([y.detach(), dx], want[:2], msg=name)
        assert y.stride() == (x if name == "a slice" else given).stride(), name
        assert group_norm(given, 2, weight, bias, backend="reference").stride() == (
            y.stride() if name != "a slice" else x.stride()
        )
    rows = x.flatten(2).mT.contiguous().mT
    assert kernel(2)(rows).stride() == rows.stride()


@pytest.mark.parametrize("form", ["whole", "parts"])
def test_with_and_without_parameters(form, request):
    if form == "parts":
        request.getfixturevalue("in_parts")
    x, weight, bias, dy = tensors((2, 6, 5), torch.bfloat16)
    for given in ((x,), (x, weight), (x, weight.float(), bias.float()), (x, weight.float(), bias)):
        assert_no_less_exact(kernel(2), plain(2), given, (dy,))
    assert_no_less_exact(
        lambda a, b: kernel(2)(a, None, b), lambda a, b: plain(2)(a, None, b), (x, bias), (dy,)
    )


@pytest.mark.parametrize("form", ["whole", "parts"])
def test_gradients_are_only_made_where_they_are_needed(form, request):
    if form == "parts":
        request.getfixturevalue("in_parts")
    x, weight, bias, dy = tensors((2, 6, 5))
    want = results(plain(2), (x, weight, bias), (dy,))
    for i, leaf in enumerate((x, weight, bias)):
        leaf.requires_grad_()
        kernel(2)(x, weight, bias).backward(dy)
        torch.testing.assert_close(leaf.grad, want[1 + i])
        leaf.requires_grad_(False)


def test_the_same_run_twice_is_the_same(in_parts):
    *inputs, dy = tensors((2, 4, 35), torch.bfloat16)
    assert_the_same_twice(kernel(2), inputs, (dy,))


@pytest.mark.parametrize("silu", [False, True])
def test_reference_gradients_and_values(silu):
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 6, 2, 2), (6,), (6,))
    )
    assert torch.autograd.gradcheck(plain(3, silu), (x, weight, bias))
    want = F.group_norm(x, 3, weight, bias)
    torch.testing.assert_close(group_norm(x, 3, weight, bias, silu=silu), F.silu(want) if silu else want)


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.group_norm import triton

    x, weight, bias, _ = (t.requires_grad_() for t in tensors((2, 4, 3, 2)))
    last = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    torch.library.opcheck(triton.group_norm, (x, 2, weight, bias, 1e-5, True))
    torch.library.opcheck(triton.group_norm, (last, 2, None, bias, 1e-5, False))
    compiled = torch.compile(lambda *a: kernel(2)(*a) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(last, weight, bias), kernel(2)(last, weight, bias) * 2)
    assert compiled(last, weight, bias).stride() == last.stride()


def test_errors_name_the_argument():
    x, weight, bias, _ = tensors((2, 8, 3))
    for groups in (0, 3):
        with pytest.raises(KernelError, match="groups does not divide"):
            group_norm(x, groups)
    with pytest.raises(KernelError, match="weight does not fit"):
        group_norm(x, 2, weight[:4])
    with pytest.raises(KernelError, match="bias does not fit"):
        group_norm(x, 2, weight, bias[:4])
    with pytest.raises(KernelError, match="x has an unsupported dtype"):
        group_norm(x.int(), 2)
    with pytest.raises(KernelError, match="bias has an unsupported dtype"):
        group_norm(x, 2, weight, bias.int())
    with pytest.raises(KernelError, match="weight is on another device"):
        group_norm(x, 2, weight.to("meta"))
    with pytest.raises(KernelError, match="x has no channels"):
        group_norm(x[0, 0], 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_than_two_to_the_31_elements(layout):
    x = torch.randn(1, 64, 2**25 + 1, dtype=torch.bfloat16, device="cuda")
    x = laid(x, layout).requires_grad_()
    y = group_norm(x, 32, silu=True)
    y.backward(torch.ones_like(y))
    ends = [y.detach()[:, -2:, -5:].float(), x.grad[:, -2:, -5:].float()]
    short = x.detach()[:, -2:].float().requires_grad_()
    want = F.silu(F.group_norm(short, 1))
    want.backward(torch.ones_like(want))
    torch.testing.assert_close(ends, [want.detach()[..., -5:], short.grad[..., -5:]], rtol=2**-6, atol=1e-2)
