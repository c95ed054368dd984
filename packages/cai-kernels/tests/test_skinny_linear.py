"""Linear layers of few rows, against float64."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE

from cai_kernels import KernelError, skinny_linears
from cai_kernels.skinny_linear import skinny_pays

BACKENDS = ["triton", "reference"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def layers(rows, inputs, outputs, dtype):
    random = torch.Generator().manual_seed(inputs)

    def draw(*shape):
        return (torch.rand(shape, generator=random) - 0.5).to(DEVICE, dtype)

    biases = [draw(count) for count in outputs]
    return draw(*rows, inputs), [draw(count, inputs) for count in outputs], biases


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [(1,), (1, 3), (17,), (0,)])
@pytest.mark.parametrize(("outputs", "biased"), [((33,), True), ((16, 100), False), ((64, 3, 9), True)])
def test_equals_the_layers_one_by_one(outputs, biased, rows, dtype, backend):
    hidden, weights, biases = layers(rows, 300, outputs, dtype)
    outs = skinny_linears(hidden, weights, biases if biased else (), backend=backend)
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        expected = hidden.double() @ weight.double().T + bias.double() * biased
        assert out.dtype == dtype and out.shape == (*rows, len(weight))
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.skinny_linear import triton

    hidden, weights, biases = layers((2,), 64, (16, 20), torch.float32)
    torch.library.opcheck(triton.skinny_linears, (hidden, weights, biases))


def test_where_it_pays():
    assert skinny_pays(1, [16]) and skinny_pays(8, [4096]) and skinny_pays(64, [4096, 1024, 1024])
    assert not skinny_pays(65, [4096, 1024]) and not skinny_pays(64, [4096]) and not skinny_pays(8, [64])


def test_errors_name_the_argument():
    hidden, weights, biases = layers((2,), 64, (16, 20), torch.float32)
    for match, arguments in (
        ("one to three layers", (hidden, weights * 2)),
        ("one to three layers", (hidden, weights, biases[:1])),
        (r"weights\[1\] does not fit hidden", (hidden, [weights[0], weights[1][:, :3]])),
        (r"weights\[0\] does not fit hidden", (hidden[:, :16], [weights[0][:, :16]])),
        (r"weights\[0\] has an unsupported dtype", (hidden, [weights[0].double()])),
        (r"biases\[0\] does not fit", (hidden, weights, [biases[0][:3], biases[1]])),
        ("takes no gradient", (hidden.clone().requires_grad_(), weights)),
    ):
        with pytest.raises(KernelError, match=match):
            skinny_linears(*arguments)
    with pytest.raises(KernelError, match="too many rows"):
        skinny_linears(torch.zeros(65, 64, device=DEVICE), weights, backend="triton")
