"""Rotary embedding: as Hugging Face computes it and no less exact, in every layout, forward and backward."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, DTYPES, assert_the_same_twice

from cai_kernels import KernelError, rope
from cai_kernels.rope import reference
from cai_kernels.testing import assert_no_less_exact, results

# batch, heads of q, heads of k, length, size of a head, rotary dim
SHAPES = [
    (2, 4, 2, 5, 16, 16),
    (1, 3, 1, 7, 12, 12),
    (2, 5, 1, 3, 20, 8),
    (1, 1, 1, 1, 2, 2),
    (2, 4, 2, 0, 8, 8),
]


def tensors(batch, q_heads, k_heads, length, size, dtype):
    random = torch.Generator().manual_seed(length + size)
    made = [torch.randn(batch, length, n, size, generator=random) for n in (q_heads, k_heads) * 2]
    q, k, dq, dk = (t.to(DEVICE, dtype).transpose(1, 2) for t in made)
    return (q, k), (dq, dk)


def tables(length, rotary_dim, dtype=torch.float32, *, full=True, interleaved=False):
    frequency = 100.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(length)[:, None] * frequency
    if full:
        angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    return angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype)


def kernel(cos, sin, position_ids=None, **options):
    return lambda q, k: rope(q, k, cos, sin, position_ids, backend="triton", **options)


def plain(cos, sin, position_ids=None, interleaved=False, rotary_dim=None):
    return lambda q, k: reference.rope(q, k, cos, sin, position_ids, interleaved, rotary_dim or q.shape[-1])


def hugging_face(cos, sin):
    """LLaMA's own, in the dtype of q."""

    def half_turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    def rotated(x):
        return x * cos.to(x.dtype)[None, None] + half_turn(x) * sin.to(x.dtype)[None, None]

    return lambda q, k: (rotated(q), rotated(k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_error_is_no_larger_than_eager(shape, dtype, interleaved):
    *sizes, rotary_dim = shape
    inputs, upstream = tensors(*sizes, dtype)
    cos, sin = tables(shape[3], rotary_dim, dtype, interleaved=interleaved)
    options = {"interleaved": interleaved, "rotary_dim": rotary_dim}
    assert_no_less_exact(kernel(cos, sin, **options), plain(cos, sin, **options), inputs, upstream)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_hugging_face(dtype):
    inputs, upstream = tensors(2, 6, 2, 5, 16, dtype)
    cos, sin = tables(5, 16, dtype)
    assert_no_less_exact(kernel(cos, sin), hugging_face(cos, sin), inputs, upstream)
    eager = hugging_face(cos, sin)(*inputs)
    torch.testing.assert_close(rope(*inputs, cos, sin), eager, rtol=0.02, atol=0.02)


def test_interleaved_pairs_are_complex_numbers():
    (q, k), _ = tensors(2, 3, 1, 5, 8, torch.float32)
    cos, sin = tables(5, 8, full=False)
    turned = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
    want = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(kernel(cos, sin, interleaved=True)(q, k)[0], want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_half_width_batches_and_dtypes(interleaved):
    inputs, _ = tensors(2, 4, 2, 5, 16, torch.bfloat16)
    full = tables(5, 16, torch.float32, interleaved=interleaved)
    half = tables(5, 16, torch.float32, full=False)
    want = kernel(*full, interleaved=interleaved)(*inputs)
    for cos, sin in (half, [t[None] for t in half], [t.expand(2, 5, 8).contiguous() for t in half]):
        for form in ("triton", "reference"):
            got = rope(*inputs, cos, sin, interleaved=interleaved, backend=form)
            torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)
    shifted = [torch.stack((t, t.flip(0))) for t in half]
    for form in ("triton", "reference"):
        got = rope(*inputs, *shifted, interleaved=interleaved, backend=form)[0][1]
        alone = rope(*inputs, *(t.flip(0) for t in half), interleaved=interleaved, backend=form)[0][1]
        assert torch.equal(got, alone)


def test_position_ids_into_a_table():
    inputs, upstream = tensors(2, 4, 2, 3, 16, torch.float32)
    cos, sin = tables(11, 16)
    for ids in ([[7, 2, 10], [0, 0, 5]], [[4, 5, 6]], [4, 5, 6]):
        positions = torch.tensor(ids, device=DEVICE)
        form = kernel(cos, sin, positions)
        assert_no_less_exact(form, plain(cos, sin, positions), inputs, upstream)
        assert torch.equal(form(*inputs)[0], kernel(cos[None], sin[None], positions.int())(*inputs)[0])
    rows = torch.tensor([4, 5, 6], device=DEVICE)
    assert torch.equal(form(*inputs)[1], kernel(cos[rows], sin[rows])(*inputs)[1])


@pytest.mark.parametrize("heads", [1, 7, 32, 40])
def test_any_number_of_heads(heads):
    inputs, upstream = tensors(1, heads, 1, 2, 8, torch.float32)
    cos, sin = tables(2, 8)
    assert_no_less_exact(kernel(cos, sin), plain(cos, sin), inputs, upstream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("q_heads", "k_heads", "size"), [(8, 4, 128), (16, 8, 64), (8, 8, 256)])
def test_heads_that_divide_into_groups(q_heads, k_heads, size, interleaved, dtype):
    from cai_kernels.rope import triton

    assert triton._group(q_heads, k_heads, size), "or the shapes above test it already"
    inputs, upstream = tensors(2, q_heads, k_heads, 3, size, dtype)
    cos, sin = tables(3, size, dtype, interleaved=interleaved)
    options = {"interleaved": interleaved}
    assert_no_less_exact(kernel(cos, sin, **options), plain(cos, sin, **options), inputs, upstream)


def test_results_lie_in_memory_as_the_inputs_do():
    (q, k), (dq, dk) = tensors(2, 4, 2, 5, 16, torch.float32)
    cos, sin = tables(5, 16)
    want = results(plain(cos, sin), (q, k), (dq, dk))
    packed = torch.cat((q.transpose(1, 2), k.transpose(1, 2)), 2)
    of_packed = packed[:, :, :4].transpose(1, 2), packed[:, :, 4:].transpose(1, 2)
    odd = q.transpose(-1, -2).contiguous().transpose(-1, -2), k.contiguous()
    for a, b in ((q, k), (q.contiguous(), k), of_packed, odd):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        outputs = kernel(cos, sin)(a, b)
        got = [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, (a, b), (dq, dk.contiguous()))]
        torch.testing.assert_close(got, want)
    assert kernel(cos, sin)(q, k)[0].stride() == q.stride()
    assert kernel(cos, sin)(*of_packed)[0].transpose(1, 2).is_contiguous()


def test_gradients_are_only_made_where_they_are_needed():
    (q, k), (dq, dk) = tensors(2, 4, 2, 5, 16, torch.float32)
    cos, sin = tables(5, 16)
    want = results(plain(cos, sin), (q, k), (dq, dk))
    for i, (leaf, upstream) in enumerate(((q, dq), (k, dk))):
        leaf.requires_grad_()
        kernel(cos, sin)(q, k)[i].backward(upstream)
        torch.testing.assert_close(leaf.grad, want[2 + i])
        leaf.requires_grad_(False)


def test_the_same_run_twice_is_the_same():
    inputs, upstream = tensors(2, 5, 2, 9, 16, torch.bfloat16)
    form = kernel(*tables(9, 16))
    assert_the_same_twice(form, inputs, upstream)


@pytest.mark.parametrize("interleaved", [False, True])
def test_reference_gradients(interleaved):
    q, k = (torch.randn(1, n, 3, 6, dtype=torch.float64, requires_grad=True) for n in (2, 1))
    cos, sin = (t.double().requires_grad_() for t in tables(3, 4, full=False))
    assert torch.autograd.gradcheck(
        lambda *a: reference.rope(*a, None, interleaved, 4), (q.to(DEVICE), k.to(DEVICE), cos, sin)
    )


def test_the_op_is_clean_for_the_compiler():
    from cai_kernels.rope import triton

    (q, k), _ = tensors(2, 4, 2, 5, 16, torch.float32)
    q, k = q.requires_grad_(), k.requires_grad_()
    cos, sin = tables(5, 16)
    torch.library.opcheck(triton.rope, (q, k, cos, sin, None, 16, False, False))
    ids = torch.arange(5, device=DEVICE)
    torch.library.opcheck(triton.rope, (q, k.detach(), cos, sin, ids, 8, True, False))
    compiled = torch.compile(lambda a, b: kernel(cos, sin)(a, b), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k), kernel(cos, sin)(q, k))


def test_errors_name_the_argument():
    (q, k), _ = tensors(2, 4, 2, 5, 16, torch.float32)
    cos, sin = tables(5, 16)
    ids = torch.arange(5, device=DEVICE)
    with pytest.raises(KernelError, match="q has another number of dims"):
        rope(q[0], k, cos, sin)
    with pytest.raises(KernelError, match="k does not fit q"):
        rope(q, k[:, :, :4], cos, sin)
    with pytest.raises(KernelError, match="rotary_dim does not fit q"):
        rope(q, k, cos, sin, rotary_dim=18)
    with pytest.raises(KernelError, match="rotary_dim does not fit q"):
        rope(q, k, cos, sin, rotary_dim=3)
    for wrong in (cos[:4], cos[:, :6], cos[0], cos.expand(3, 5, 16)):
        with pytest.raises(KernelError, match="cos does not fit q"):
            rope(q, k, wrong, wrong)
    with pytest.raises(KernelError, match="cos does not fit q"):
        rope(q, k, cos.expand(2, 5, 16), sin.expand(2, 5, 16), ids)
    with pytest.raises(KernelError, match="sin does not fit cos"):
        rope(q, k, cos, sin[:, :8])
    with pytest.raises(KernelError, match="position_ids does not fit q"):
        rope(q, k, cos, sin, ids[:3])
    with pytest.raises(KernelError, match="position_ids has an unsupported dtype"):
        rope(q, k, cos, sin, ids.float())
    with pytest.raises(KernelError, match="k is on another device"):
        rope(q, k.to("meta"), cos, sin)
    with pytest.raises(KernelError, match="no gradient for cos and sin"):
        rope(q, k, cos.requires_grad_(), sin, backend="triton")
