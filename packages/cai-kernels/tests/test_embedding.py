"""Embedding: torch's rows, and a gradient that is exact however often an id occurs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, DTYPES, assert_the_same_twice

from cai_kernels import KernelError, embedding
from cai_kernels.embedding import reference
from cai_kernels.testing import assert_no_less_exact, results


def kernel(ids, padding_idx=None):
    return lambda weight: embedding(ids, weight, padding_idx, backend="triton")


def plain(ids, padding_idx=None):
    return lambda weight: reference.embedding(ids, weight, padding_idx)


def tensors(ids, vocabulary, columns, dtype):
    random = torch.Generator().manual_seed(len(ids))
    weight = torch.randn(vocabulary, columns, generator=random).to(DEVICE, dtype)
    dy = torch.randn(*ids.shape, columns, generator=random).to(DEVICE, dtype)
    return weight, dy


def some(shape, vocabulary, seed=0):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


CASES = {
    "few of many": some((3, 5), 1000),
    "every one often": some((7, 23), 5),
    "one everywhere": torch.full((150,), 3, device=DEVICE),
    "one long among others": torch.cat(
        (some((40,), 9), torch.full((90,), 4, device=DEVICE), some((40,), 9, 1))
    ),
    "runs of chunks": torch.arange(6, device=DEVICE).repeat_interleave(32),
    "runs across chunks": torch.arange(8, device=DEVICE).repeat_interleave(20),
    "a single one": torch.tensor([2], device=DEVICE),
    "none": torch.zeros(0, 4, dtype=torch.int64, device=DEVICE),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", list(CASES.values()), ids=list(CASES))
def test_error_is_no_larger_than_eager(ids, dtype):
    weight, dy = tensors(ids, 1000 if ids is CASES["few of many"] else 10, 24, dtype)
    order = torch.finfo(torch.float32).eps * ids.numel() ** 0.5  # of a sum in float32
    assert_no_less_exact(kernel(ids), plain(ids), (weight,), (dy,), floor=order)


@pytest.mark.parametrize("columns", [1, 123, 700])
def test_any_number_of_columns(columns):
    ids = some((4, 11), 6)
    weight, dy = tensors(ids, 6, columns, torch.float32)
    assert_no_less_exact(kernel(ids), plain(ids), (weight,), (dy,))


def test_more_chunks_than_are_added_at_once(monkeypatch):
    from cai_kernels.embedding import triton

    monkeypatch.setattr(triton, "CHUNK", 2)
    monkeypatch.setattr(triton, "AT_ONCE", 4)
    ids = torch.cat((some((9,), 5), torch.full((31,), 3, device=DEVICE)))
    weight, dy = tensors(ids, 5, 8, torch.float32)
    torch.testing.assert_close(results(kernel(ids), (weight,), (dy,)), results(plain(ids), (weight,), (dy,)))


@pytest.mark.parametrize("padding_idx", [0, 3, -2])
def test_padding_has_no_gradient(padding_idx):
    for ids in (CASES["runs across chunks"] % 5, some((4, 7), 5)):  # over the edges of chunks, and within one
        weight, dy = tensors(ids, 5, 8, torch.float32)
        want = results(lambda w, ids=ids: F.embedding(ids, w, padding_idx), (weight,), (dy,))
        for form in (kernel(ids, padding_idx), plain(ids, padding_idx % 5)):
            torch.testing.assert_close(results(form, (weight,), (dy,)), want)
        assert (want[1][padding_idx] == 0).all()


def test_strided_gradient_and_int32_ids():
    ids = some((6, 10), 7)
    weight, dy = tensors(ids, 7, 16, torch.float32)
    want = results(plain(ids), (weight,), (dy,))
    weight.requires_grad_()
    for upstream in (
        dy.transpose(0, 1).contiguous().transpose(0, 1),
        dy.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        got = torch.autograd.grad(kernel(ids.int().t().contiguous().t())(weight), weight, upstream)
        torch.testing.assert_close(got[0], want[1])


def test_the_same_run_twice_is_the_same():
    ids = some((100,), 3)
    weight, dy = tensors(ids, 3, 40, torch.bfloat16)
    assert_the_same_twice(kernel(ids), (weight,), (dy,))


def test_reference_gradients():
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(plain(torch.tensor([0, 4, 4, 2])), weight)


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.embedding import triton

    ids = some((3, 5), 7)
    weight = tensors(ids, 7, 16, torch.float32)[0].requires_grad_()
    torch.library.opcheck(triton.embedding, (ids, weight, -1))
    compiled = torch.compile(lambda w: kernel(ids)(w) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(weight), F.embedding(ids, weight) * 2)


def test_errors_name_the_argument():
    weight = torch.randn(5, 3, device=DEVICE)
    ids = some((4,), 5)
    with pytest.raises(KernelError, match="ids has an unsupported dtype"):
        embedding(ids.float(), weight)
    with pytest.raises(KernelError, match="ids is on another device"):
        embedding(ids.to("meta"), weight)
    with pytest.raises(KernelError, match="weight has another number of dims"):
        embedding(ids, weight[0])
    with pytest.raises(KernelError, match="weight has an unsupported dtype"):
        embedding(ids, weight.int())
    with pytest.raises(KernelError, match="padding_idx is no row"):
        embedding(ids, weight, 5)
