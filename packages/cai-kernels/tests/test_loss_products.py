"""The linear cross-entropy as products: used by hand they equal autograd through a linear layer and a loss."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE
from torch.nn import functional as F

from cai_kernels.linear_cross_entropy import LossProducts

OPTIONS = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none"},
    {"reduction": "none", "softcap": 2.0, "ignore_index": 3},
]


def inputs(bias, dtype=torch.float32, shape=(2, 7), width=16, columns=29):
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*shape, width, generator=gen), torch.randn(columns, width, generator=gen) / 4
    leaves = [x, weight, *([torch.randn(columns, generator=gen)] if bias else [])]
    target = torch.randint(0, columns, shape, generator=gen)
    return [t.to(DEVICE, dtype).requires_grad_() for t in leaves], target.to(DEVICE)


def plain(leaves, target, softcap=None, reduction="mean", **options):
    logits = F.linear(*leaves).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction=reduction, **options)
    return loss.view(target.shape) if reduction == "none" else loss


def run(leaves, target, dy, needs=(True, True, True), **options):
    """(the products, loss, gradient of x, operands of the weight's, gradient of the bias)."""
    products, bias = LossProducts(target, **options), leaves[2] if len(leaves) > 2 else None
    with torch.no_grad():
        loss, saved = products.forward(leaves[0], leaves[1], bias)
        names = ("needs_input", "needs_weight", "needs_bias")
        needs = {
            n: need and (n != "needs_bias" or bias is not None) for n, need in zip(names, needs, strict=True)
        }
        return products, loss, *products.backward(dy, leaves[1], saved, **needs)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_autograd(options, bias, backend):
    leaves, target = inputs(bias)
    loss = plain(leaves, target, **options)
    dy = torch.rand_like(loss) + 1
    wanted = torch.autograd.grad(loss, leaves, dy)
    products, got, dx, operands, db = run(leaves, target, dy, backend=backend, **options)
    torch.testing.assert_close(got, loss.detach())
    torch.testing.assert_close(dx, wanted[0])
    torch.testing.assert_close(products.weight_grad(operands), wanted[1])
    if bias:
        torch.testing.assert_close(db, wanted[2])
    out = torch.full_like(wanted[1], float("nan"))
    products.write_weight_grad(operands, out, fresh=True)
    products.write_weight_grad(operands, out, fresh=False)
    torch.testing.assert_close(out, 2 * wanted[1])


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sum_dtype", [torch.float32, torch.bfloat16])
def test_a_weight_gradient_is_rounded_once(sum_dtype, out_dtype):
    """A gradient summed in 16 bits (large weights) is scaled and added in float32."""
    products, gen = LossProducts(torch.zeros(1, dtype=torch.int64)), torch.Generator().manual_seed(0)
    dw = torch.randn(8, 16, generator=gen).to(DEVICE, sum_dtype)
    before = torch.randn(8, 16, generator=gen).to(DEVICE, out_dtype)
    factor = torch.tensor(1 / 3, device=DEVICE)
    out = before.clone()
    products.write_weight_grad((dw, factor), out, fresh=False)
    wanted = before.double() + dw.double() * factor.double()
    assert ((out - wanted).abs() <= 4 * torch.finfo(out_dtype).eps).all()  # the sums are less than 8
    products.write_weight_grad((dw, factor), out, fresh=True)
    assert torch.equal(out, (dw.float() * factor).to(out_dtype))


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_only_what_is_needed(options, needs):
    leaves, target = inputs(bias=True)
    for leaf, need in zip(leaves, needs, strict=True):
        leaf.requires_grad_(need)
    loss = plain(leaves, target, **options)
    (wanted,) = torch.autograd.grad(
        loss, [leaf for leaf in leaves if leaf.requires_grad], torch.ones_like(loss)
    )
    products, _, dx, operands, db = run(leaves, target, torch.ones_like(loss), needs, **options)
    assert (dx is not None, bool(operands), db is not None) == needs
    got = products.weight_grad(operands) if needs[1] else dx if needs[0] else db
    torch.testing.assert_close(got, wanted)


def test_two_backwards_scale_alike():
    """The gradients of forward are not scaled in place, so a graph that was kept gives them again."""
    leaves, target = inputs(bias=False)
    products = LossProducts(target)
    with torch.no_grad():
        loss, saved = products.forward(*leaves, None)
        every = {"needs_input": True, "needs_weight": True, "needs_bias": False}
        first, second = (products.backward(loss.new_tensor(f), leaves[1], saved, **every) for f in (3.0, 1.0))
        torch.testing.assert_close(first[0], 3 * second[0])
        torch.testing.assert_close(products.weight_grad(first[1]), 3 * products.weight_grad(second[1]))


def test_float16_means_do_not_vanish():
    leaves, target = inputs(False, torch.float16, shape=(4, 64), columns=3000)
    loss = plain(leaves, target)
    wanted = torch.autograd.grad(loss, leaves)
    products, _, dx, operands, _ = run(leaves, target, torch.ones_like(loss))
    assert products.weight_grad(operands).count_nonzero() > wanted[1].count_nonzero()
    torch.testing.assert_close(dx, wanted[0], atol=1e-6, rtol=2e-2)
