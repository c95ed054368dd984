"""Log-probabilities over a cut vocabulary are those of whole logits, and no tensor has all of a rank's logits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer, defer, direct_linears
from cai_mesh.layout import FlatChunk, layout_of
from cai_tensor_parallel import Plan, head_log_probs, is_cut_by_columns
from cai_tensor_parallel.cut.transform import Cut
from cai_tensor_parallel.log_probs.chunks import TorchChunks, merged
from cai_tensor_parallel.modes.cutter import Cutter
from cai_tensor_parallel.trial.virtual_ranks import on_virtual_ranks

WIDTH, VOCAB, PLACES = 6, 23, 40
PLAN = Plan({"head": "vocab_head"})
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
        logits[
            7, :10
        ] = -1e4  # so far down that they weigh nothing, as minus infinity does, of which autograd makes NaN
    target, weights = targets(), torch.randn(2, PLACES, dtype=torch.float64, generator=random)
    target[7] = 20
    exact = logits.clone().requires_grad_()
    log_probs, entropies = plain(exact, target, softcap)
    (log_probs * weights[0] + (entropies * weights[1] if entropy else 0)).sum().backward()
    if softcap is None:
        logits[7, :10] = -math.inf
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
    """An output layer."""

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


def cut(ranks, model, exact, softcap=None, entropy=False, frozen=False, deferred=False):
    """Compare a rank's results and gradients with those of the whole layer."""
    Cut("1d", "sharded", False, False)(
        model, PLAN, ranks, Cutter((("tp", ranks.degree("tp"), ranks.index("tp")),))
    )
    assert is_cut_by_columns(model.head)
    params, own, target = dict(model.named_parameters()), hidden().requires_grad_(), targets()
    if not frozen:
        chunk, device = FlatChunk(params.items()), torch.device("cpu")
        buffer = GradBuffer(chunk, list(params.values()), torch.float64, device)
        direct_linears(model, params.values())
    options = {"softcap": softcap, "entropy": entropy, "chunk_bytes": CHUNK}
    waiting = None
    columns = model.head.weight.shape[0]
    with Widest(columns) as widest:
        result = head_log_probs(model.head, own.view(4, 10, WIDTH), target.view(4, 10), **options)
        parts = result if entropy else (result,)
        loss = sum((part.flatten() * w).sum() for part, w in zip(parts, weights(), strict=False))
        if deferred:
            with defer(params.values()) as waiting:
                loss.backward()
        else:
            loss.backward()
    # the weight has as many columns in one of its forms
    assert widest.places <= max(WIDTH, CHUNK // (8 * columns)) < PLACES, widest.places
    for part, expected in zip(parts, exact["results"], strict=False):
        torch.testing.assert_close(part.flatten(), expected)
    torch.testing.assert_close(own.grad, exact["hidden"])
    if frozen:
        assert all(p.grad is None for p in params.values())
        return
    if waiting is not None:
        assert not buffer.is_open
        waiting.flush()
    views = buffer.chunk.views(buffer.take())
    for (name, p), view in zip(params.items(), views, strict=True):
        for mine, box in layout_of(p).slices():
            torch.testing.assert_close(view[mine], exact["gradients"][name][box.slices()], msg=name)


def weights():
    return torch.randn(2, PLACES, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("degree", [2, 3, 5])
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case) or "plain")
def test_a_cut_head_gives_what_the_whole_one_does(degree, case):
    """Of 23 columns five ranks have 5, 5, 5, 5 and 3; chunks hold three places of two ranks, and more of others."""
    bias, options = case.get("bias", False), {k: v for k, v in case.items() if k != "bias"}
    whole, x = build(bias), hidden().requires_grad_()
    results = plain(whole(x), targets(), case.get("softcap"))
    used = results if case.get("entropy") else results[:1]
    sum((part * w).sum() for part, w in zip(used, weights(), strict=False)).backward()
    exact = {"results": [part.detach() for part in results], "hidden": x.grad}
    exact["gradients"] = {name: p.grad for name, p in whole.named_parameters()}
    models = [build(bias).requires_grad_(not case.get("frozen", False)) for _ in range(degree)]
    on_virtual_ranks({"tp": degree}, lambda ranks: cut(ranks, models[ranks.rank], exact, **options))


def test_a_rank_without_a_column_takes_part():
    """Of 23 columns 22 ranks have two each, so the last ten have none."""
    model, x = build(True), hidden()
    expected = plain(model(x), targets(), None)[0].detach()
    models = [build(True) for _ in range(22)]

    def log_probs(ranks):
        Cut("1d", "sharded", False, False)(
            models[ranks.rank], PLAN, ranks, Cutter((("tp", 22, ranks.index("tp")),))
        )
        own = hidden().requires_grad_()
        result = head_log_probs(models[ranks.rank].head, own, targets(), chunk_bytes=CHUNK)
        result.sum().backward()
        return result.detach(), own.grad, models[ranks.rank].head.weight.shape[0]

    found = on_virtual_ranks({"tp": 22}, log_probs)
    assert found[-1][2] == 0
    for result, gradient, _ in (found[0], found[-1]):
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(gradient, found[1][1])


def test_layers_that_are_not_cut_are_refused():
    with pytest.raises(PlanError, match="columns they share"):
        head_log_probs(build(False).head, hidden(), targets())
