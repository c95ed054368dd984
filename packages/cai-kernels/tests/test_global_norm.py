"""The norm of many tensors: as exact as the norm of their concatenation, whatever their dtypes and sizes."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_checks import DEVICE

from cai_kernels import KernelError, global_norm
from cai_kernels.global_norm import reference

POWERS = [1.0, 2.0, 3.0, 0.5, math.inf]


def tensors(dtypes=(torch.float32,)):
    random = torch.Generator().manual_seed(0)
    shapes = [(5, 123, 123), (1,), (0, 4), (7, 1), (), (8192,), (8193,), (3, 4, 1000)]
    return [
        torch.randn(shape, generator=random).to(DEVICE, dtypes[i % len(dtypes)])
        for i, shape in enumerate(shapes)
    ]


def exact(values, p):
    return torch.linalg.vector_norm(torch.cat([v.double().flatten() for v in values]), p)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,), (torch.bfloat16,), (torch.float16,), (torch.bfloat16, torch.float32, torch.float16)],
)
def test_norm(dtypes, p):
    values = tensors(dtypes)
    for backend, rtol in (
        ("triton", 1e-6),
        ("reference", 1e-4),
    ):  # torch adds up one after the other on the CPU
        got = global_norm(values, p, backend=backend)
        assert got.dtype == torch.float32
        assert got.shape == ()
        torch.testing.assert_close(got.double(), exact(values, p), rtol=rtol, atol=0.0)


def test_many_small_tensors_and_a_table_of_any_length():
    for count in (1, 2, 3, 31, 64):
        values = [torch.full((i % 5 + 1,), float(i), device=DEVICE) for i in range(count)]
        torch.testing.assert_close(global_norm(values, backend="triton").double(), exact(values, 2.0))


def test_more_blocks_than_programs(monkeypatch):
    from cai_kernels.global_norm import triton

    monkeypatch.setattr(triton, "BLOCK", 64)
    values = tensors()[3:]
    for p in (2.0, math.inf):
        torch.testing.assert_close(global_norm(values, p, backend="triton").double(), exact(values, p))


def test_unaligned_and_strided_tensors():
    base = torch.randn(101, 33, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    values = [base.flatten()[1:], base.t(), base[::2, 3:7]]
    torch.testing.assert_close(global_norm(values, backend="triton").double(), exact(values, 2.0))


@pytest.mark.parametrize("p", POWERS)
def test_nan_and_infinity_are_seen(p):
    values = tensors()
    values[0][1, 2, 3] = math.inf
    assert global_norm(values, p, backend="triton") == math.inf
    values[-1][0, 0, 0] = math.nan
    assert global_norm(values, p, backend="triton").isnan()
    assert global_norm(values, p).isnan()


def test_nothing_to_add_and_float64():
    empty = [torch.zeros(0, device=DEVICE)]
    assert global_norm(empty, backend="triton") == 0
    assert global_norm(empty) == 0
    values = [v.double() for v in tensors()]
    assert torch.equal(global_norm(values), reference.global_norm(values, 2.0))
    torch.testing.assert_close(global_norm(values), exact(values, 2.0))


def test_gradients_are_not_followed():
    values = [v.requires_grad_() for v in tensors()]
    assert not global_norm(values, backend="triton").requires_grad
    assert not global_norm(values).requires_grad


def test_the_same_run_twice_is_the_same():
    values = tensors((torch.bfloat16, torch.float32))
    assert torch.equal(*(global_norm(values, backend="triton") for _ in range(2)))


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.global_norm import triton

    values = tensors()[3:6]
    torch.library.opcheck(triton.global_norm, (values, 2.0))
    compiled = torch.compile(
        lambda *a: global_norm(a, backend="triton") * 2, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(*values), global_norm(values, backend="triton") * 2)


def test_errors_name_the_argument():
    values = tensors()
    with pytest.raises(KernelError, match="tensors is empty"):
        global_norm([])
    with pytest.raises(KernelError, match="p is not positive"):
        global_norm(values, 0.0)
    with pytest.raises(KernelError, match=r"tensors\[1\] has an unsupported dtype"):
        global_norm([values[0], values[1].int()])
    with pytest.raises(KernelError, match=r"tensors\[0\] has an unsupported dtype"):
        global_norm([values[0].double()], backend="triton")
