"""The loss of next tokens from logits whose vocabulary is cut, by torch and by kernels, is that of whole logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from cai_apps.compose.losses import KernelColumns, NextTokenLoss
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import ShardedLogits
from cai_tensor_parallel.modes.cross_entropy import TorchColumns


@dataclass
class Output:
    logits: torch.Tensor


def by_columns(kernels, columns, dtype, device):
    """Loss and gradient of this rank's columns, and whether they are those of whole logits."""
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 7, columns, generator=random, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(columns, (3, 7), generator=random).to(device)
    labels[0, 2:4], labels[1, -1], labels[2], labels[:, -1] = -100, -100, -100, -100
    rank, part = dist.get_rank(), -(-columns // dist.get_world_size())
    start = min(rank * part, columns)
    own = whole[..., start : start + part].clone().requires_grad_()
    exact = whole.clone().requires_grad_()
    loss = NextTokenLoss(ShardedLogits(dist.group.WORLD, start), kernels)
    found = loss(Output(own), labels)
    wide = exact.flatten(0, 1)
    wide = wide if dtype == torch.float64 else wide.float()
    expected = F.cross_entropy(wide, labels.flatten(), reduction="sum")
    (found * 0.5).backward(retain_graph=True)
    (expected * 0.5).backward()
    torch.testing.assert_close(found, expected)
    check_predictions(loss, own, whole, labels)
    if kernels == "on" and own.numel():
        with pytest.raises(RuntimeError, match=r"inplace operation|second time"):
            found.backward()
    torch.testing.assert_close(own.grad, exact.grad[..., start : start + own.shape[-1]])
    return type(loss._maths(own)).__name__


def check_predictions(loss, own, whole, labels):
    """The likeliest tokens are those of whole logits, the first of equal ones too, on whichever ranks those are."""
    with torch.no_grad():
        even = whole.clone()
        even[1, 3], even[0, 0, 1], even[0, 0, -1] = 2.0, 50.0, 50.0
        start = loss.form.start
        for logits in (whole, even):
            mine = Output(logits[..., start : start + own.shape[-1]])
            assert torch.equal(loss.likeliest(mine), logits.argmax(-1))
            assert torch.equal(loss.predicted(mine), logits.argmax(-1))
            guesses = torch.where(labels == -100, labels, logits.argmax(-1))
            guesses[0, 1] = (guesses[0, 1] + 1) % logits.shape[-1]
            assert int(loss.correct(mine, guesses)) == int((labels != -100).sum()) - 1
        broken = whole.clone()
        broken[0, 2] = math.nan
        tokens = loss.likeliest(Output(broken[..., start : start + own.shape[-1]]))
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < whole.shape[-1], "it is fed to the model again"


@pytest.mark.parametrize(
    ("kernels", "dtype", "columns", "maths"),
    [
        ("off", torch.float32, 10, "NoneType"),
        ("auto", torch.float32, 11, "NoneType"),  # on a CPU
        ("on", torch.float32, 10, "KernelColumns"),
        ("on", torch.float64, 11, "KernelColumns"),
        ("on", torch.bfloat16, 10, "KernelColumns"),
    ],
)
def test_equals_that_of_whole_logits(kernels, dtype, columns, maths):
    assert run_ranks(2, by_columns, kernels, columns, dtype, "cpu") == [maths] * 2


def test_a_rank_without_a_column():
    assert run_ranks(3, by_columns, "on", 4, torch.float32, "cpu") == ["KernelColumns"] * 2 + ["NoneType"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 700, 1000])
def test_kernels_give_what_torch_does_on_a_gpu(dtype, first):
    random = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(67, 523, device="cuda", generator=random).to(dtype)
    target = torch.randint(1600, (67,), device="cuda", generator=random)
    target[:5] = -100
    kernels = NextTokenLoss(ShardedLogits())._maths(logits)
    assert isinstance(kernels, KernelColumns)
    counts = target != -100
    ours, theirs = (
        maths.scan(logits, target, vocab_start=first, ignore_index=-100)
        for maths in (kernels, TorchColumns())
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[counts], other[counts])
    dloss = torch.randn(67, device="cuda", generator=random) * counts
    ours, theirs = (
        maths.gradient(logits.clone(), target, theirs[0], theirs[1] * 3, dloss, vocab_start=first)
        for maths in (kernels, TorchColumns())
    )
    torch.testing.assert_close(ours, theirs)
