"""Preference losses: the papers' formulas, masks and edges, and hidden states in, logits never whole."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_checks import DEVICE
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cai_kernels import (
    KernelError,
    dpo_loss,
    grpo_loss,
    kto_loss,
    linear_log_probs,
    linear_sequence_log_probs,
    orpo_loss,
    reward_loss,
    sequence_log_probs,
    simpo_loss,
)
from cai_kernels.linear_cross_entropy import chunked

FORMS = ["triton", "reference"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of lanes that are masked out


def logs(*shape, seed=0, scale=2.0, dtype=torch.float64):
    """Random log-probabilities, below zero."""
    random = torch.Generator().manual_seed(seed)
    return (-scale * torch.rand(shape, generator=random, dtype=torch.float64) - 0.01).to(DEVICE, dtype)


def assert_exact(got, want):
    """Compare float64 with a formula, to 1e-10."""
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def sigmoid(v):
    return 1 / (1 + math.exp(-v))


def dpo_by_hand(pair, beta, smoothing):
    chosen, rejected, ref_chosen, ref_rejected = pair
    p = sigmoid(beta * math.log(math.exp(chosen - ref_chosen) / math.exp(rejected - ref_rejected)))
    return -(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p)


def ipo_by_hand(pair, tau):
    chosen, rejected, ref_chosen, ref_rejected = pair
    return (math.log(math.exp(chosen - rejected) * math.exp(ref_rejected - ref_chosen)) - 0.5 / tau) ** 2


def robust_by_hand(pair, beta, smoothing):
    chosen, rejected, ref_chosen, ref_rejected = pair
    p = sigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))
    return (-(1 - smoothing) * math.log(p) + smoothing * math.log(1 - p)) / (1 - 2 * smoothing)


def hinge_by_hand(pair, beta):
    return max(0.0, 1 - beta * ((pair[0] - pair[2]) - (pair[1] - pair[3])))


def orpo_by_hand(pair, weight):
    odds = [math.exp(a) / (1 - math.exp(a)) for a in pair]
    return -pair[0] - weight * math.log(sigmoid(math.log(odds[0] / odds[1])))


def simpo_by_hand(pair, beta, gamma):
    return -math.log(sigmoid(beta * pair[0] - beta * pair[1] - gamma))


PAIRS = [
    (dpo_loss, 4, {"beta": 0.3}, lambda pair: dpo_by_hand(pair, 0.3, 0.0)),
    (
        dpo_loss,
        4,
        {"beta": 0.3, "label_smoothing": 0.2},
        lambda pair: dpo_by_hand(pair, 0.3, 0.2),
    ),
    (dpo_loss, 4, {"beta": 0.4, "form": "ipo"}, lambda pair: ipo_by_hand(pair, 0.4)),
    (
        dpo_loss,
        4,
        {"beta": 0.3, "form": "robust", "label_smoothing": 0.2},
        lambda pair: robust_by_hand(pair, 0.3, 0.2),
    ),
    (dpo_loss, 4, {"beta": 0.6, "form": "hinge"}, lambda pair: hinge_by_hand(pair, 0.6)),
    (orpo_loss, 2, {"weight": 0.7}, lambda pair: orpo_by_hand(pair, 0.7)),
    (simpo_loss, 2, {"beta": 2.5, "margin": 0.6}, lambda pair: simpo_by_hand(pair, 2.5, 0.6)),
]
NAMES = ["dpo", "dpo-smoothed", "ipo", "robust", "hinge", "orpo", "simpo"]


@pytest.mark.parametrize(("loss", "count", "options", "by_hand"), PAIRS, ids=NAMES)
@pytest.mark.parametrize("pairs", [1, 7])
def test_pairs_are_as_the_paper_says(loss, count, options, by_hand, pairs):
    given = [logs(pairs, seed=i) for i in range(count)]
    want = torch.tensor(
        [by_hand(pair) for pair in zip(*(g.tolist() for g in given), strict=True)],
        dtype=torch.float64,
        device=DEVICE,
    )
    for reduction, expected in (("none", want), ("sum", want.sum()), ("mean", want.mean())):
        got, metrics = loss(*given, reduction=reduction, **options)
        assert_exact(got, expected)
    scale = options.get("beta", options.get("weight"))
    refs = given[2:] or [torch.zeros_like(given[0])] * 2
    for rewards, policy, ref in zip(
        (metrics.chosen_rewards, metrics.rejected_rewards), given, refs, strict=False
    ):
        assert_exact(rewards, scale * (policy - ref))
    assert torch.equal(metrics.accuracies, (metrics.chosen_rewards > metrics.rejected_rewards).double())
    leaves = [g.clone().requires_grad_() for g in given]
    assert torch.autograd.gradcheck(lambda *a: loss(*a, *given[2:], **options)[0], leaves[:2])
    loss(*leaves, **options)[0].backward()
    assert all(leaf.grad is None for leaf in leaves[2:]), "no gradient into the reference"
    assert not any(t.requires_grad for t in (metrics.chosen_rewards, metrics.margins))


@pytest.mark.parametrize(("loss", "count", "options", "by_hand"), PAIRS, ids=NAMES)
def test_no_pairs_give_zero_and_narrow_dtypes_are_widened(loss, count, options, by_hand):
    leaf = logs(0).requires_grad_()
    out = loss(leaf, *[logs(0)] * (count - 1), **options)[0]
    assert out.item() == 0
    out.backward()
    assert leaf.grad.shape == (0,)
    narrow = [logs(5, seed=i, dtype=torch.bfloat16) for i in range(count)]
    got = loss(*narrow, **options)[0]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, loss(*(n.float() for n in narrow), **options)[0])


@pytest.mark.parametrize(("loss", "count", "options", "by_hand"), PAIRS, ids=NAMES)
def test_large_margins_neither_overflow_nor_vanish(loss, count, options, by_hand):
    chosen = torch.tensor([-1e-9, -900.0, 0.0], device=DEVICE).requires_grad_()
    rejected = torch.tensor([-900.0, -1e-9, 0.0], device=DEVICE).requires_grad_()
    refs = [torch.zeros(3, device=DEVICE)] * (count - 2)
    losses = loss(chosen, rejected, *refs, reduction="none", **options)[0]
    losses.sum().backward()
    assert all(t.isfinite().all() for t in (losses, chosen.grad, rejected.grad))
    assert losses[1] > losses[0] and chosen.grad[1] < -0.05


def test_rewards_are_as_the_papers_say():
    chosen, rejected, margin = logs(6, seed=1), logs(6, seed=2), -logs(6, seed=3)
    rows = list(zip(chosen.tolist(), rejected.tolist(), margin.tolist(), strict=True))
    plain = [math.log(1 + math.exp(r - c)) for c, r, _ in rows]
    wide = [math.log(1 + math.exp(r - c + m)) + 0.3 * (c + r) ** 2 for c, r, m in rows]
    leaves = [v.clone().requires_grad_() for v in (chosen, rejected, margin)]
    assert_exact(reward_loss(chosen, rejected, reduction="none")[0].tolist(), plain)
    loss, metrics = reward_loss(*leaves, center=0.3, reduction="none")
    assert_exact(loss.tolist(), wide)
    assert torch.autograd.gradcheck(lambda c, r: reward_loss(c, r, margin, center=0.3)[0], leaves[:2])
    loss.sum().backward()
    assert leaves[2].grad is None
    assert_exact(metrics.margins, chosen - rejected)
    far = torch.tensor([-3e4, 3e4], device=DEVICE, requires_grad=True)
    out = reward_loss(far, -far, reduction="none")[0]  # log(1 + exp(6e4)) is 6e4, though exp overflows
    assert out.tolist() == [6e4, 0.0]
    out.sum().backward()
    assert far.grad.tolist() == [-2.0, 0.0]


@pytest.mark.parametrize("kl", [0.3, -0.2])
def test_kto_is_as_the_paper_says(kl):
    policy, ref = logs(6, seed=1), logs(6, seed=2)
    desirable = torch.tensor([True, False, True, True, False, False], device=DEVICE)
    beta, good, bad = 0.4, 1.3, 0.8
    want = []
    for p, r, d in zip(policy.tolist(), ref.tolist(), desirable.tolist(), strict=True):
        reward, point = math.log(math.exp(p) / math.exp(r)), max(kl, 0.0)
        value = good * sigmoid(beta * (reward - point)) if d else bad * sigmoid(beta * (point - reward))
        want.append((good if d else bad) - value)
    want = torch.tensor(want, dtype=torch.float64, device=DEVICE)
    options = {"beta": beta, "desirable_weight": good, "undesirable_weight": bad}
    for reduction, expected in (("none", want), ("sum", want.sum()), ("mean", want.mean())):
        got, metrics = kto_loss(policy, ref, desirable, kl, reduction=reduction, **options)
        assert_exact(got, expected)
    rewards = beta * (policy - ref)
    assert_exact(metrics.rewards, rewards)
    assert_exact(metrics.desirable_reward, rewards[desirable].mean())
    assert_exact(metrics.undesirable_reward, rewards[~desirable].mean())
    assert metrics.kl.item() == max(kl, 0.0)
    leaves = [t.clone().requires_grad_() for t in (policy, ref)]
    point = torch.tensor(kl, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda a: kto_loss(a, ref, desirable, point.detach(), **options)[0], leaves[:1]
    )
    kto_loss(*leaves, desirable, point, **options)[0].backward()
    assert leaves[1].grad is None and point.grad is None
    one = kto_loss(policy[:1], ref[:1], desirable[:1], kl, **options)
    assert_exact(one[0], want[0])
    assert one[1].undesirable_reward == 0
    assert kto_loss(policy[:0], ref[:0], desirable[:0], kl)[0] == 0


def grpo_by_hand(new, old, gains, mask, ref, beta, clip, importance, normalize, constant):
    """Token by token, on lists."""
    total, counted, sequences = 0.0, sum(map(sum, mask)), len(new)
    for i, kept in enumerate(mask):
        places = [t for t, keep in enumerate(kept) if keep]
        if not places:
            continue
        whole = math.prod(math.exp(new[i][t]) / math.exp(old[i][t]) for t in places) ** (1 / len(places))
        mine = 0.0
        for t in places:
            ratio = whole if importance == "sequence" else math.exp(new[i][t]) / math.exp(old[i][t])
            gain = gains[i][t] if isinstance(gains[i], list) else gains[i]
            bounded = min(max(ratio, 1 - clip[0]), 1 + clip[1])
            odds = math.exp(ref[i][t]) / math.exp(new[i][t])
            mine += min(ratio * gain, bounded * gain) - beta * (odds - math.log(odds) - 1)
        share = {"sequence": sequences * len(places), "tokens": counted}.get(
            normalize, sequences * (constant or 1)
        )
        total -= mine / share
    return total


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize(
    ("normalize", "constant"), [("sequence", None), ("tokens", None), ("constant", 9.0)], ids=str
)
@pytest.mark.parametrize("wide", [False, True], ids=["a gain a sequence", "a gain a token"])
def test_grpo_is_as_the_papers_say(importance, normalize, constant, wide):
    new, old, ref = (logs(5, 6, seed=i) for i in range(3))
    gains = logs(*((5, 6) if wide else (5,)), seed=4) + 1
    mask = torch.rand(5, 6, generator=torch.Generator().manual_seed(5)).to(DEVICE) < 0.6
    mask[3] = False
    options = {
        "beta": 0.2,
        "clip": (0.1, 0.3),
        "importance": importance,
        "normalize": normalize,
        "constant": constant,
    }
    want = grpo_by_hand(*(t.tolist() for t in (new, old, gains, mask, ref)), **options)
    got, metrics = grpo_loss(new, old, gains, mask, ref_log_probs=ref, **options)
    assert got.item() == pytest.approx(want, rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda a: grpo_loss(a, old, gains, mask, ref_log_probs=ref, **options)[0],
        (new.clone().requires_grad_(),),
    )
    kl = ((ref - new).exp() - (ref - new) - 1)[mask].mean()
    torch.testing.assert_close(metrics.kl, kl)
    if importance == "token":
        ratio, gain = (new - old).exp()[mask], (gains if wide else gains[:, None].expand(5, 6))[mask]
        torch.testing.assert_close(metrics.ratio, ratio.mean())
        torch.testing.assert_close(metrics.clipped_low, ((ratio < 0.9) & (gain < 0)).double().mean())
        torch.testing.assert_close(metrics.clipped_high, ((ratio > 1.3) & (gain > 0)).double().mean())
        assert metrics.clipped_low > 0 and metrics.clipped_high > 0
    leaves = [t.clone().requires_grad_() for t in (new, old, gains, ref)]
    grpo_loss(*leaves[:3], mask, ref_log_probs=leaves[3], **options)[0].backward()
    assert leaves[0].grad is not None and all(leaf.grad is None for leaf in leaves[1:])


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("garbage", [float("nan"), -float("inf"), float("inf")])
def test_what_is_outside_the_mask_is_not_used(importance, garbage):
    new, old, ref, gains = (logs(3, 4, seed=i) for i in range(4))
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]], device=DEVICE).bool()
    options = {"beta": 0.1, "importance": importance}
    results = []
    for fill in (0.0, garbage):
        leaf, *others = (torch.where(mask, t, fill) for t in (new, old, gains, ref))
        leaf.requires_grad_()
        loss, metrics = grpo_loss(leaf, *others[:2], mask, ref_log_probs=others[2], **options)
        results.append([loss, *torch.autograd.grad(loss, leaf), metrics.kl, metrics.ratio])
        total = sequence_log_probs(leaf, mask, average=True)
        results[-1] += [total, *torch.autograd.grad(total.sum(), leaf)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert (results[0][1][~mask] == 0).all() and (results[0][1][mask] != 0).any()


def test_grpo_without_tokens_or_an_old_policy():
    for normalize, constant in (("sequence", None), ("tokens", None), ("constant", 3)):
        for shape in ((0, 4), (3, 0), (3, 4)):
            leaf = logs(*shape).requires_grad_()
            mask = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
            gains = torch.ones(shape[0], device=DEVICE)
            loss, metrics = grpo_loss(leaf, None, gains, mask, normalize=normalize, constant=constant)
            loss.backward()
            assert loss == 0 and not leaf.grad.any() and metrics.ratio == 0 and metrics.kl is None
    leaf, gains = logs(2, 3).requires_grad_(), torch.tensor([1.0, -2.0], device=DEVICE)
    loss, metrics = grpo_loss(leaf, None, gains)
    loss.backward()
    torch.testing.assert_close(loss.item(), 0.5)
    torch.testing.assert_close(leaf.grad, -gains.double()[:, None].expand(2, 3) / 6)
    assert metrics.ratio == 1 and metrics.clipped_low == 0


def test_sequences():
    values = logs(2, 3, 4)
    mask = torch.tensor([1, 0, 1, 1], device=DEVICE).bool().expand(2, 3, 4).clone()
    mask[0, 1] = False
    kept = values * mask
    torch.testing.assert_close(sequence_log_probs(values), values.sum(-1))
    torch.testing.assert_close(sequence_log_probs(values, average=True), values.mean(-1))
    torch.testing.assert_close(sequence_log_probs(values, mask), kept.sum(-1))
    want = kept.sum(-1) / 3
    torch.testing.assert_close(sequence_log_probs(values, mask, average=True), want)
    assert want[0, 1] == 0
    assert sequence_log_probs(values[..., :0], average=True).tolist() == [[0] * 3] * 2
    assert sequence_log_probs(values.bfloat16()).dtype == torch.float32


def hidden(dtype=torch.float64, sequences=6, tokens=5, width=4, vocab=37):
    random = torch.Generator().manual_seed(vocab)
    x = torch.randn(2, sequences, tokens, width, generator=random, dtype=torch.float64).to(DEVICE, dtype)
    weight = torch.randn(2, vocab, width, generator=random, dtype=torch.float64).to(DEVICE, dtype)
    target = torch.randint(0, vocab, (sequences, tokens), generator=random)
    target[:, 0], target[1, 3:] = -100, -100
    return x, weight, target.to(DEVICE)


def plain_tokens(x, weight, target):
    found = F.linear(x, weight).log_softmax(-1).gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(target == -100, 0.0, found)


def every_loss(tokens, ref_tokens, target):
    """One number from every loss, from the log-probabilities of tokens [2N, T]."""
    counted = target != -100
    total, ref = tokens.sum(-1), ref_tokens.sum(-1)
    average = total / counted.sum(-1)
    gains = torch.linspace(-1, 1, len(target), device=DEVICE, dtype=tokens.dtype)
    return {
        "dpo": dpo_loss(*total.chunk(2), *ref.chunk(2))[0],
        "ipo": dpo_loss(*average.chunk(2), *(ref / counted.sum(-1)).chunk(2), form="ipo")[0],
        "orpo": orpo_loss(*average.chunk(2))[0],
        "simpo": simpo_loss(*average.chunk(2))[0],
        "kto": kto_loss(total, ref, gains > 0, 0.1)[0],
        "grpo": grpo_loss(tokens, ref_tokens, gains, counted, ref_log_probs=ref_tokens + 0.1, beta=0.1)[0],
    }


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, "triton")],
    ids=str,
)
def test_gradients_through_the_head_are_those_of_plain_logits(dtype, backend):
    (x, ref_x), (weight, ref_weight), target = hidden(dtype)
    ref = plain_tokens(ref_x, ref_weight, target)
    x.requires_grad_()
    weight.requires_grad_()
    plain = every_loss(plain_tokens(x, weight, target), ref, target)
    for name, want in plain.items():
        tokens = linear_log_probs(x, weight, target, backend=backend, chunk_bytes=1000)
        got = every_loss(tokens, ref, target)[name]
        torch.testing.assert_close(got, want, msg=name)
        for a, b in zip(
            torch.autograd.grad(got, (x, weight)),
            torch.autograd.grad(want, (x, weight), retain_graph=True),
            strict=True,
        ):
            assert b.abs().max() > 1e-4
            torch.testing.assert_close(a, b, atol=1e-5 * b.abs().max().item(), rtol=1e-5)
    if dtype == torch.float64:

        def whole(x, weight):
            tokens = linear_log_probs(x, weight, target, backend=backend, chunk_bytes=1000)
            return torch.stack(list(every_loss(tokens, ref, target).values()))

        assert torch.autograd.gradcheck(whole, (x, weight))


@pytest.mark.parametrize("backend", FORMS)
def test_sequences_of_hidden_states(backend):
    (x, _), (weight, _), target = hidden(torch.float32)
    target[2] = -100
    for average in (False, True):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        got = linear_sequence_log_probs(*leaves, target, average=average, backend=backend, chunk_bytes=900)
        want = plain_tokens(*leaves, target).sum(-1)
        want = want / (target != -100).sum(-1).clamp(min=1) if average else want
        torch.testing.assert_close(got, want)
        assert got[2] == 0
        for a, b in zip(
            torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
        ):
            torch.testing.assert_close(a, b)
    bias, kept = torch.linspace(-1, 1, len(weight), device=DEVICE), (target != -100) & (target != 5)
    options = {"bias": bias, "ignore_index": 5, "backend": backend}
    picked = (F.linear(x, weight) + bias).log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    total = torch.where(kept, picked, 0.0).sum(-1)
    for average, want in ((False, total), (True, total / kept.sum(-1).clamp(min=1))):
        got = linear_sequence_log_probs(x, weight, target.where(kept, 5), average=average, **options)
        torch.testing.assert_close(got, want)


class Largest(TorchDispatchMode):
    """The most elements of any tensor made, inside the operators of the linear layer too."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cai_kernels":
            with self:
                out = getattr(chunked, "_" + func.name().split("::")[1])(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def largest(sequences, log_probs):
    """(forward, backward) of a DPO and a GRPO loss on `sequences` of 16 tokens, 400 words, 4 channels."""
    (x, ref_x), (weight, ref_weight), target = hidden(torch.float32, sequences, 16, 4, 400)
    x.requires_grad_()
    weight.requires_grad_()
    with Largest() as forward:
        tokens = log_probs(x, weight, target)
        with torch.no_grad():
            ref = log_probs(ref_x, ref_weight, target)
        losses = every_loss(tokens, ref, target)
    with Largest() as backward:
        (losses["dpo"] + losses["grpo"]).backward()
    assert x.grad is not None and weight.grad is not None
    return forward.elements, backward.elements


def test_no_tensor_is_larger_than_a_chunk_forward_and_backward():
    rows, vocab = 3, 400

    def ours(x, weight, target):
        return linear_log_probs(x, weight, target, chunk_bytes=rows * vocab * 4)

    at_most = max(rows * vocab, vocab * 4)  # a chunk's logits, the weight
    assert largest(4, ours) == largest(16, ours) == (at_most, at_most)
    assert largest(4, plain_tokens) == (4 * 16 * vocab, 4 * 16 * vocab), "the watch sees plain logits"


@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "simpo", "kto", "grpo"])
def test_one_graph_with_the_head(name):
    (x, ref_x), (weight, ref_weight), target = hidden(torch.float32)
    ref = plain_tokens(ref_x, ref_weight, target)

    def step(x, weight):
        tokens = linear_log_probs(x, weight, target, chunk_bytes=1000)
        return every_loss(tokens, ref, target)[name]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = []
    for fn in (step, compiled):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = fn(*leaves)
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_metrics_come_out_of_a_compiled_graph():
    pair = [logs(3, seed=i) for i in range(4)]
    compiled = torch.compile(dpo_loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*pair)[1].margins, dpo_loss(*pair)[1].margins)


def test_errors_of_pairs_name_the_argument():
    a, b = logs(3), logs(4)
    for call, said in (
        (lambda: dpo_loss(a, b, a, a), "rejected does not fit chosen"),
        (lambda: dpo_loss(a, a, a, b), "ref_rejected does not fit chosen"),
        (lambda: dpo_loss(a.long(), a, a, a), "chosen has an unsupported dtype"),
        (lambda: dpo_loss(a[:, None], a, a, a), "chosen has another number of dims"),
        (lambda: dpo_loss(a, a.to("meta"), a, a), "rejected is on another device"),
        (lambda: dpo_loss(a, a, a, a, form="square"), "unknown form"),
        (lambda: dpo_loss(a, a, a, a, beta=0), "beta is out of range"),
        (lambda: dpo_loss(a, a, a, a, label_smoothing=0.5), "label_smoothing is out of range"),
        (
            lambda: dpo_loss(a, a, a, a, form="ipo", label_smoothing=0.1),
            "form 'ipo' knows no label smoothing",
        ),
        (lambda: dpo_loss(a, a, a, a, reduction="avg"), "unknown reduction"),
        (lambda: orpo_loss(a, a, weight=-1), "weight is out of range"),
        (lambda: orpo_loss(a, b), "rejected does not fit chosen"),
        (lambda: simpo_loss(a, a, beta=float("nan")), "beta is out of range"),
        (lambda: simpo_loss(a, a, margin=-0.1), "margin is out of range"),
        (lambda: reward_loss(a, b), "rejected does not fit chosen"),
        (lambda: reward_loss(a, a, b), "margin does not fit chosen"),
        (lambda: reward_loss(a, a, center=-1), "center is out of range"),
        (lambda: kto_loss(a, a, a, 0.0), "desirable has an unsupported dtype"),
        (lambda: kto_loss(a, a, b > 0, 0.0), "desirable does not fit log_probs"),
        (lambda: kto_loss(a, a, a > 0, a), "kl is not a scalar"),
        (lambda: kto_loss(a, a, a > 0, 0.0, undesirable_weight=-1), "undesirable_weight is out of range"),
    ):
        with pytest.raises(KernelError, match=said):
            call()


def test_errors_of_groups_and_sequences_name_the_argument():
    a, gains = logs(3, 4), logs(3)
    for call, said in (
        (lambda: grpo_loss(gains, None, gains), "log_probs has another number of dims"),
        (lambda: grpo_loss(a, a[:2], gains), "old_log_probs does not fit log_probs"),
        (lambda: grpo_loss(a, a, gains[:2]), "advantages do not fit log_probs"),
        (lambda: grpo_loss(a, a, gains.long()), "advantages has an unsupported dtype"),
        (lambda: grpo_loss(a, a, gains, a), "mask has an unsupported dtype"),
        (lambda: grpo_loss(a, a, gains, a[:, 1:] > 0), "mask does not fit log_probs"),
        (lambda: grpo_loss(a, a, gains, beta=0.1), "give ref_log_probs"),
        (lambda: grpo_loss(a, a, gains, beta=-0.1, ref_log_probs=a), "beta is out of range"),
        (lambda: grpo_loss(a, a, gains, clip=(-0.1, 0.2)), "clip's low is out of range"),
        (lambda: grpo_loss(a, a, gains, clip=(0.1,)), "clip is not a pair"),
        (lambda: grpo_loss(a, a, gains, importance="group"), "unknown importance"),
        (lambda: grpo_loss(a, a, gains, normalize="batch"), "unknown normalize"),
        (lambda: grpo_loss(a, a, gains, normalize="constant"), "go together"),
        (lambda: grpo_loss(a, a, gains, constant=3), "go together"),
        (lambda: grpo_loss(a, a, gains, normalize="constant", constant=0), "constant is out of range"),
        (lambda: sequence_log_probs(a[0, 0]), "log_probs has no dim of tokens"),
        (lambda: sequence_log_probs(a, a[0] > 0), "mask does not fit log_probs"),
        (lambda: sequence_log_probs(a.long()), "log_probs has an unsupported dtype"),
        (lambda: linear_sequence_log_probs(a[0], a, torch.tensor(1)), "target has no dim of tokens"),
    ):
        with pytest.raises(KernelError, match=said):
            call()
