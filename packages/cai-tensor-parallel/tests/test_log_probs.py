"""Log-probabilities over a cut vocabulary are those of whole logits, and no tensor has all of a rank's logits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer, defer, direct_linears
from cai_mesh.layout import FlatChunk, layout_of
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import Plan, head_log_probs, is_cut_by_columns, parallelize
from cai_tensor_parallel.log_probs.chunks import TorchChunks, merged

WIDTH, VOCAB, PLACES = 6, 23, 40
CHUNK = 3 * 12 * 8
"""Bytes of three places' float64 logits of half the vocabulary."""


def plain(logits, target, softcap):
    """Log-probabilities and entropies, written from their definitions."""
    wide = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logs = wide.log_softmax(-1)
    ignored = target == -100
    chosen = logs.gather(1, target.clamp(min=0)[:, None])[:, 0]
    entropy = -torch.where(logs.exp() == 0, 0.0, logs.exp() * logs).sum(-1)
    return chosen.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)


def targets():
    target = torch.randint(0, VOCAB, (PLACES,), generator=torch.Generator().manual_seed(1))
    target[3:6] = -100
    return target


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_parts_of_columns_give_what_whole_ones_do(softcap, entropy):
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(PLACES, VOCAB, dtype=torch.float64, generator=random)
    if softcap is None:
        logits[7, 2:9] = -1e4 if entropy else -math.inf  # autograd has no gradient of 0 times infinity
    target, weights = targets(), torch.randn(2, PLACES, dtype=torch.float64, generator=random)
    target[7] = 20
    exact = logits.clone().requires_grad_()
    log_probs, entropies = plain(exact, target, softcap)
    (log_probs * weights[0] + (entropies * weights[1] if entropy else 0)).sum().backward()
    maths, ends = TorchChunks(), [0, 10, 13, 13, VOCAB]
    parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    scans = [
        maths.scan(
            logits[:, part].clone(),
            target,
            first=part.start,
            ignore_index=-100,
            softcap=softcap,
            entropy=entropy,
        )
        for part in parts
    ]
    maximum = torch.stack([scan[0] for scan in scans]).amax(0)
    total, aimed, moment = sum(merged(scan, maximum) for scan in scans)
    counted = target != -100
    torch.testing.assert_close((aimed - maximum - total.log())[counted], log_probs.detach()[counted])
    entropy_found = total.log() - moment / total
    if entropy:
        torch.testing.assert_close(entropy_found[counted], entropies.detach()[counted])
    upstream = (weights if entropy else weights[:1]).masked_fill(~counted, 0.0)
    for part in parts:
        own = logits[:, part].clone()
        stats = torch.stack((maximum, total, entropy_found))
        maths.write_gradient(own, target, stats, upstream, first=part.start, softcap=softcap)
        expected = exact.grad[:, part]
        torch.testing.assert_close(own, expected)


class Head(nn.Module):
    """An output layer, tied to its input embedding or not, as torch's or GPT-2's."""

    def __init__(self, bias: bool):
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias)

    def forward(self, x):
        return self.head(x)


def build(bias, dtype=torch.float64):
    torch.manual_seed(2)
    model = Head(bias).to(dtype)
    for p in model.parameters():
        nn.init.normal_(p)
    return model


class Widest(TorchDispatchMode):
    """Records the most places for which a result of any operation has this rank's columns."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.places = columns, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[-1] == self.columns:
                self.places = max(self.places, value.numel() // self.columns)
        return out


def hidden():
    random = torch.Generator().manual_seed(3)
    return torch.randn(PLACES, WIDTH, dtype=torch.float64, generator=random)


CASES = [
    {},
    {"bias": True, "softcap": 2.0},
    {"bias": True, "entropy": True},
    {"entropy": True, "softcap": 1.5},
    {"frozen": True},
    {"deferred": True},
]


def cut(bias=False, softcap=None, entropy=False, frozen=False, deferred=False):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole, x, target = build(bias), hidden().requires_grad_(), targets()
    whole.requires_grad_(not frozen)
    model = parallelize(
        build(bias).requires_grad_(not frozen), mesh, Plan({"head": "vocab_head"}), logits="sharded"
    )
    assert is_cut_by_columns(model.head) and not is_cut_by_columns(whole.head)
    params = dict(model.named_parameters())
    if not frozen:
        buffer = GradBuffer(
            FlatChunk(params.items()), list(params.values()), torch.float64, torch.device("cpu")
        )
        direct_linears(model, params.values())
    expected = plain(whole(x), target, softcap)
    weights = torch.randn(2, PLACES, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    loss = (expected[0] * weights[0]).sum() + ((expected[1] * weights[1]).sum() if entropy else 0)
    loss.backward()
    own = hidden().requires_grad_()
    columns = model.head.weight.shape[0]
    with Widest(columns) as widest:
        result = head_log_probs(
            model.head,
            own.view(4, 10, WIDTH),
            target.view(4, 10),
            softcap=softcap,
            entropy=entropy,
            chunk_bytes=CHUNK,
        )
        parts = result if entropy else (result,)
        loss = sum((part.flatten() * w).sum() for part, w in zip(parts, weights, strict=False))
        waiting = None
        if deferred:
            with defer(params.values()) as waiting:
                loss.backward()
        else:
            loss.backward()
    assert widest.places <= max(3, WIDTH), widest.places  # the weight has as many columns in one of its forms
    for part, exact in zip(parts, expected, strict=False):
        torch.testing.assert_close(part.flatten(), exact.detach())
    torch.testing.assert_close(own.grad, x.grad)
    if frozen:
        assert all(p.grad is None for p in params.values())
        return
    if waiting is not None:
        assert not buffer.is_open
        waiting.flush()
    views = buffer.chunk.views(buffer.take())
    for (name, p), view in zip(params.items(), views, strict=True):
        for mine, box in layout_of(p).slices():
            torch.testing.assert_close(view[mine], dict(whole.named_parameters())[name].grad[box.slices()])


def all_cases():
    for case in CASES:
        cut(**case)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_cut_head_gives_what_the_whole_one_does(ranks):
    """Of 23 columns two ranks have 12 and 11; three have 8, 8 and 7."""
    run_ranks(ranks, all_cases)


def test_layers_that_are_not_cut_are_refused():
    with pytest.raises(PlanError, match="columns they share"):
        head_log_probs(build(False).head, hidden(), targets())
