"""Attention with pair bias and gate: no less exact than eager torch, forward and every gradient, any shape."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, DTYPES
from torch._subclasses.fake_tensor import FakeTensorMode

from cai_kernels import KernelError, pair_bias_attention
from cai_kernels.backend import choose, planning_for
from cai_kernels.testing import assert_no_less_exact, results

# backward computes probabilities again as 2^(score - lse), both of them rounded and the lse brought to base e and back:
# a few float32 roundings of the size of a score (up to 6 in base 2 here), which are a relative error of a probability
ROUNDINGS = 8 * torch.finfo(torch.float32).eps
CASES = [  # B, R, N, S, H
    (1, 2, 2, 37, 20),
    (2, 3, 1, 5, 123),
    (2, 1, 2, 1, 8),
    (1, 1, 1, 70, 1),
    (2, 0, 2, 6, 16),
    (1, 2, 1, 0, 16),
]


def tensors(case, dtype):
    batch, rows, heads, length, head = case
    random = torch.Generator().manual_seed(length + head)

    def draw(*shape):
        return torch.randn(shape, generator=random).to(DEVICE, dtype)

    # as modules give them: heads split off the last dim, so every one is a strided view
    q, k, v, gate = (draw(batch, rows, length, heads, head).transpose(2, 3) for _ in range(4))
    bias = draw(batch, length, length, heads).permute(0, 3, 1, 2)
    mask = torch.where(torch.rand(batch, rows, length, generator=random) < 0.2, -1e4, 0.0).to(DEVICE, dtype)
    return [q, k, v, bias, gate], mask, draw(batch, rows, heads, length, head)


def eager(mask):
    def run(q, k, v, bias, gate):
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores + bias[:, None] + mask.to(q.dtype)[:, :, None, None, :]
        return torch.sigmoid(gate) * (torch.softmax(scores, -1) @ v)

    return run


def roundings(inputs, mask, dout):
    """What `ROUNDINGS` leave in every result: each is linear in the probabilities, so they count by its size."""
    exact = results(eager(mask), [t.double() for t in inputs], [dout.double()])
    return [ROUNDINGS * max(1.0, t.abs().max().item() if t.numel() else 0.0) for t in exact]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_no_larger_than_eager(case, dtype):
    inputs, mask, dout = tensors(case, dtype)
    # with one key the softmax's gradients are differences of equals
    if case[3] == 1:
        floor = 4 * torch.finfo(dtype).eps * dout.abs().max().item()
    else:
        floor = roundings(inputs, mask, dout)
    ours = lambda q, k, v, b, g: pair_bias_attention(q, k, v, b, mask, g, backend="triton")  # noqa: E731
    assert_no_less_exact(ours, eager(mask), inputs, [dout], floor=floor)


@pytest.mark.parametrize("parts", ["none", "bias", "mask", "gate"])
def test_every_part_may_be_left_out(parts):
    (q, k, v, bias, gate), mask, dout = tensors((2, 2, 1, 9, 16), torch.float32)
    given = {
        "pair_bias": bias if parts == "bias" else None,
        "mask": mask if parts == "mask" else None,
        "gate": gate if parts == "gate" else None,
    }
    for scale in (None, 0.4):
        ours, theirs = (
            results(
                lambda q, k, v, backend=backend, scale=scale: pair_bias_attention(
                    q, k, v, **given, scale=scale, backend=backend
                ),
                [q, k, v],
                [dout],
            )
            for backend in ("triton", "reference")
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_log_sum_exp_and_its_gradient():
    inputs, mask, dout = tensors((2, 2, 2, 35, 16), torch.float32)
    dlse = torch.randn(2, 2, 2, 35, device=DEVICE)

    def run(backend):
        return lambda q, k, v, b, g: pair_bias_attention(
            q, k, v, b, mask, g, return_lse=True, backend=backend
        )

    ours, theirs = (results(run(backend), inputs, [dout, dlse]) for backend in ("triton", "reference"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_a_query_that_sees_no_key_gives_zeros():
    inputs, mask, dout = tensors((1, 2, 1, 6, 16), torch.float32)
    mask[0, 1] = -torch.inf
    for backend in ("triton", "reference"):
        found = results(
            lambda q, k, v, b, g, backend=backend: pair_bias_attention(q, k, v, b, mask, g, backend=backend),
            inputs,
            [dout],
        )
        assert not found[0][0, 1].any() and found[0][0, 0].all()
        assert all(f.isfinite().all() for f in found)
        assert not found[1][0, 1].any() and not found[5][0, 1].any()


def test_only_the_gradients_that_are_asked_for():
    inputs, mask, dout = tensors((1, 2, 2, 9, 16), torch.float32)
    whole = results(
        lambda q, k, v, b, g: pair_bias_attention(q, k, v, b, mask, g, backend="triton"), inputs, [dout]
    )
    for i in range(5):
        leaves = [t.detach().requires_grad_(i == j) for j, t in enumerate(inputs)]
        out = pair_bias_attention(*leaves[:4], mask, leaves[4], backend="triton")
        (only,) = torch.autograd.grad(out, leaves[i], dout)
        assert torch.equal(only, whole[1 + i])


def test_the_same_run_twice_is_the_same():
    inputs, mask, dout = tensors((1, 4, 2, 40, 16), torch.bfloat16)
    run = lambda q, k, v, b, g: pair_bias_attention(q, k, v, b, mask, g, backend="triton")  # noqa: E731
    for a, b in zip(results(run, inputs, [dout]), results(run, inputs, [dout]), strict=True):
        assert torch.equal(a, b)


def test_reference_gradients():
    (q, k, v, bias, gate), mask, _ = tensors((1, 2, 1, 4, 3), torch.float64)
    leaves = [t.contiguous().requires_grad_() for t in (q, k, v, bias, gate)]
    assert torch.autograd.gradcheck(
        lambda q, k, v, b, g: pair_bias_attention(q, k, v, b, mask, g, return_lse=True, backend="reference"),
        leaves,
    )


def test_the_ops_are_clean_for_the_compiler():
    from cai_kernels.attention import triton

    inputs, mask, _ = tensors((1, 2, 1, 6, 16), torch.float32)
    q, k, v, bias, gate = (t.detach().requires_grad_() for t in inputs)
    q4, k4, v4, gate4, mask2 = (t.detach().flatten(0, 1).requires_grad_() for t in (q, k, v, gate, mask))
    arguments = (q4, k4, v4, bias, mask2.detach(), gate4, None, None)
    torch.library.opcheck(triton.attention_forward, arguments, triton.Options(0.5).arguments())
    for backend in ("triton", "reference"):
        whole = lambda q, backend=backend: pair_bias_attention(  # noqa: E731
            q * 2, k, v, bias, mask, gate, backend=backend
        )
        compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q), whole(q))


def test_errors_name_the_argument():
    (q, k, v, bias, gate), mask, _ = tensors((1, 2, 2, 6, 16), torch.float32)
    with pytest.raises(KernelError, match="q has a wrong shape"):
        pair_bias_attention(q[0], k, v)
    with pytest.raises(KernelError, match="v does not fit q"):
        pair_bias_attention(q, k, v[..., :5, :])
    with pytest.raises(KernelError, match="pair_bias does not fit q"):
        pair_bias_attention(q, k, v, bias[..., :5])
    with pytest.raises(KernelError, match="mask takes no gradient"):
        pair_bias_attention(q, k, v, bias, mask.requires_grad_())
    with pytest.raises(KernelError, match="gate has an unsupported dtype"):
        pair_bias_attention(q, k, v, bias, None, gate.half())
    with pytest.raises(KernelError, match="k is on another device"):
        pair_bias_attention(q, k.to("meta"), v)
    with pytest.raises(KernelError, match="q has an unsupported dtype"):
        pair_bias_attention(q.double(), k.double(), v.double(), backend="triton")
    with pytest.raises(KernelError, match="head dim is too large"):
        pair_bias_attention(*(torch.zeros(1, 1, 1, 2, 300, device=DEVICE),) * 3, backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [(1, 16, 4, 256, 32), (2, 5, 8, 333, 24), (1, 3, 2, 130, 128)], ids=str)
def test_sizes_of_proteins_on_the_gpu(case, dtype):
    inputs, mask, dout = tensors(case, dtype)
    ours = lambda q, k, v, b, g: pair_bias_attention(q, k, v, b, mask, g, backend="triton")  # noqa: E731
    assert_no_less_exact(ours, eager(mask), inputs, [dout], floor=ROUNDINGS)


def test_a_plan_for_a_gpu_sees_what_the_kernel_keeps():
    (q, k, v, bias, gate), mask, _ = tensors((1, 2, 2, 37, 20), torch.bfloat16)
    kept: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t)
    with planning_for(torch.device("cuda")), FakeTensorMode() as fake:
        given = [fake.from_tensor(t.cpu()).requires_grad_() for t in (q, k, v, bias)]
        with hooks:
            out = pair_bias_attention(*given, fake.from_tensor(mask.cpu()), fake.from_tensor(gate.cpu()))
    assert out.shape == q.shape
    assert kept and not any(t.shape[-2:] == (37, 37) for t in kept if t.shape != bias.shape)
    assert out.grad_fn is not None and choose("auto", torch.device("cpu")) == "reference"
