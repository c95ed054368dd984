"""Losses on pairs of a chosen and a rejected response: DPO and its family, ORPO, SimPO, and that of reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from cai_kernels.cross_entropy.function import Reduction
from cai_kernels.errors import KernelError
from cai_kernels.preference.checks import alike, known, reduced, within

DpoForm = Literal["sigmoid", "robust", "hinge", "ipo"]
"""Forms of `dpo_loss`."""


@dataclass(frozen=True)
class PreferenceMetrics:
    """The implicit rewards behind a loss on pairs; no gradient flows through them.

    Args:
        chosen_rewards: [N].
        rejected_rewards: [N].
    """

    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor

    @property
    def margins(self) -> torch.Tensor:
        """[N], chosen less rejected."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> torch.Tensor:
        """[N], 1 where the chosen response has the larger reward, else 0."""
        return (self.margins > 0).to(self.chosen_rewards.dtype)


def dpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    *,
    beta: float = 0.1,
    form: DpoForm = "sigmoid",
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> tuple[torch.Tensor, PreferenceMetrics]:
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290) and the losses that share its rewards.

    With h = (chosen - ref_chosen) - (rejected - ref_rejected) and e = label_smoothing, the loss of a pair is

        sigmoid   -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
        robust    (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2e)
        hinge     max(0, 1 - beta h)
        ipo       (h - 1 / (2 beta))²

    The first is DPO, or with e > 0 conservative DPO (Mitchell 2023); then robust DPO (Chowdhury et al.,
    arXiv:2403.00409), SLiC's hinge (Zhao et al., arXiv:2305.10425) and IPO (Azar et al., arXiv:2310.12036).

    Args:
        chosen, rejected: [N], log-probabilities of responses under the policy, summed over tokens; for IPO averages
            over tokens are often taken. float32, float64, bfloat16 or float16.
        ref_chosen, ref_rejected: [N], the same under the reference model; no gradient flows into them.
        beta: weight of the distance to the reference model; tau of IPO. More than 0.
        form: "sigmoid", "robust", "hinge" or "ipo".
        label_smoothing: the probability that a pair is the wrong way round, from 0 to below 0.5, for "sigmoid" and
            "robust" alone.
        reduction: "mean" over the pairs (0 of none), "sum" or "none".

    Returns (loss, metrics): a scalar, or [N] for "none", in float32 (float64 if an argument is); rewards are beta times
    log-ratios. Raises `KernelError` naming the argument that does not fit.
    """
    known("form", form, ("sigmoid", "robust", "hinge", "ipo"))
    within("beta", beta, 0, open_=True)
    within("label_smoothing", label_smoothing, 0, 0.5)
    if form in ("hinge", "ipo") and label_smoothing:
        raise KernelError(f"form {form!r} knows no label smoothing", got=label_smoothing, expected=0.0)
    chosen, rejected, ref_chosen, ref_rejected = alike(
        "N", chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected
    )
    better, worse = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    losses = _of_difference(better - worse, beta, form, label_smoothing)
    return reduced(losses, reduction), PreferenceMetrics(beta * better.detach(), beta * worse.detach())


def _of_difference(difference: torch.Tensor, beta: float, form: str, smoothing: float) -> torch.Tensor:
    """Return the losses [N] of differences [N] of log-ratios."""
    if form == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if form == "hinge":
        return (1 - beta * difference).relu()
    loss = -logsigmoid(beta * difference)
    if not smoothing:
        return loss
    weight = smoothing if form == "sigmoid" else -smoothing / (1 - 2 * smoothing)
    return loss + weight * beta * difference  # of the pair turned round it is loss + beta * difference


def orpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    weight: float = 0.1,
    reduction: Reduction = "mean",
) -> tuple[torch.Tensor, PreferenceMetrics]:
    """Odds ratio preference optimization (Hong et al., arXiv:2403.07691): no reference model.

    With odds(a) = exp(a) / (1 - exp(a)), the loss of a pair is
    -chosen - weight * log sigmoid(log odds(chosen) - log odds(rejected)).

    Args:
        chosen, rejected: [N], log-probabilities of responses averaged over their tokens. float32, float64, bfloat16 or
            float16. The odds are taken no closer to certainty than the dtype's epsilon.
        weight: factor on the odds ratio's term, the paper's lambda; 0 or more.
        reduction: "mean" over the pairs (0 of none), "sum" or "none".

    Returns (loss, metrics): a scalar, or [N] for "none", in float32 (float64 if an argument is); rewards are weight
    times log-probabilities, the negative log-likelihood is -chosen. Raises `KernelError` naming the argument that does
    not fit.
    """
    within("weight", weight, 0)
    chosen, rejected = alike("N", chosen=chosen, rejected=rejected)
    ratio = _log_odds(chosen) - _log_odds(rejected)
    losses = -chosen - weight * logsigmoid(ratio)
    metrics = PreferenceMetrics(weight * chosen.detach(), weight * rejected.detach())
    return reduced(losses, reduction), metrics


def _log_odds(average: torch.Tensor) -> torch.Tensor:
    average = average.clamp(max=-torch.finfo(average.dtype).eps)
    return average - (-torch.expm1(average)).log()


def simpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    beta: float = 2.0,
    margin: float = 1.0,
    reduction: Reduction = "mean",
) -> tuple[torch.Tensor, PreferenceMetrics]:
    """Simple preference optimization (Meng et al., arXiv:2405.14734): no reference model.

    The loss of a pair is -log sigmoid(beta * (chosen - rejected) - margin).

    Args:
        chosen, rejected: [N], log-probabilities of responses averaged over their tokens. float32, float64, bfloat16 or
            float16.
        beta: scale of the rewards, more than 0.
        margin: the reward margin aimed at, the paper's gamma; 0 or more.
        reduction: "mean" over the pairs (0 of none), "sum" or "none".

    Returns (loss, metrics): a scalar, or [N] for "none", in float32 (float64 if an argument is); rewards are beta times
    log-probabilities. Raises `KernelError` naming the argument that does not fit.
    """
    within("beta", beta, 0, open_=True)
    within("margin", margin, 0)
    chosen, rejected = alike("N", chosen=chosen, rejected=rejected)
    losses = -logsigmoid(beta * (chosen - rejected) - margin)
    return reduced(losses, reduction), PreferenceMetrics(beta * chosen.detach(), beta * rejected.detach())


def reward_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margin: torch.Tensor | None = None,
    *,
    center: float = 0.0,
    reduction: Reduction = "mean",
) -> tuple[torch.Tensor, PreferenceMetrics]:
    """The loss of a reward model: the Bradley-Terry likelihood of pairs (Ouyang et al., arXiv:2203.02155).

    The loss of a pair is -log sigmoid(chosen - rejected - margin) + center * (chosen + rejected)². Its first term is
    log(1 + exp(rejected - chosen + margin)), the "log-exp" loss of other libraries, computed so that no exp overflows.

    Args:
        chosen, rejected: [N], rewards that the model gives to the responses. float32, float64, bfloat16 or float16.
        margin: [N], how much better the chosen responses are said to be (Touvron et al., arXiv:2307.09288, 3.2.2); no
            gradient flows into it. None: 0.
        center: weight of the squared sum of both rewards, which keeps them around 0 (Eisenstein et al.,
            arXiv:2312.09244); 0 or more.
        reduction: "mean" over the pairs (0 of none), "sum" or "none".

    Returns (loss, metrics): a scalar, or [N] for "none", in float32 (float64 if an argument is); rewards are those that
    came in. Raises `KernelError` naming the argument that does not fit.
    """
    within("center", center, 0)
    if margin is None:
        chosen, rejected = alike("N", chosen=chosen, rejected=rejected)
        losses = -logsigmoid(chosen - rejected)
    else:
        chosen, rejected, margin = alike("N", chosen=chosen, rejected=rejected, margin=margin)
        losses = -logsigmoid(chosen - rejected - margin.detach())
    if center:
        losses = losses + center * (chosen + rejected).square()
    return reduced(losses, reduction), PreferenceMetrics(chosen.detach(), rejected.detach())
