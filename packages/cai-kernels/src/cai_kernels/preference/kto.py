"""The loss on responses that are each desirable or not: KTO."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_kernels.cross_entropy.function import Reduction
from cai_kernels.errors import KernelError
from cai_kernels.preference.checks import alike, masked_mean, reduced, truth, within


@dataclass(frozen=True)
class KtoMetrics:
    """The implicit rewards behind the loss; no gradient flows through them.

    Args:
        rewards: [N], beta times log-ratios.
        desirable_reward: their mean over the desirable responses, 0 if there are none.
        undesirable_reward: their mean over the others, 0 if there are none.
        kl: the reference point used, a scalar of 0 or more.
    """

    rewards: torch.Tensor
    desirable_reward: torch.Tensor
    undesirable_reward: torch.Tensor
    kl: torch.Tensor


def kto_loss(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    desirable: torch.Tensor,
    kl: torch.Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: Reduction = "mean",
) -> tuple[torch.Tensor, KtoMetrics]:
    """Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306): single responses, good or bad.

    With r = log_probs - ref_log_probs and z = max(kl, 0), the loss of a response is
    desirable_weight * (1 - sigmoid(beta (r - z))) or undesirable_weight * (1 - sigmoid(beta (z - r))).

    Args:
        log_probs: [N], log-probabilities of responses under the policy, summed over tokens. float32, float64,
            bfloat16 or float16.
        ref_log_probs: [N], the same under the reference model; no gradient flows into it.
        desirable: bool [N].
        kl: a scalar, the mean of log-ratios (policy less reference) of prompts with responses to other prompts, over
            the batch of all ranks; no gradient flows into it.
        beta: weight of the distance to the reference model, more than 0.
        desirable_weight, undesirable_weight: the paper's lambdas, 0 or more.
        reduction: "mean" over the responses (0 of none), "sum" or "none".

    Returns (loss, metrics): a scalar, or [N] for "none", in float32 (float64 if log-probabilities are). Raises
    `KernelError` naming the argument that does not fit.
    """
    within("beta", beta, 0, open_=True)
    within("desirable_weight", desirable_weight, 0)
    within("undesirable_weight", undesirable_weight, 0)
    log_probs, ref_log_probs = alike("N", log_probs=log_probs, ref_log_probs=ref_log_probs)
    truth("desirable", desirable, "log_probs", log_probs)
    point = torch.as_tensor(kl, dtype=log_probs.dtype, device=log_probs.device).detach()
    if point.dim():
        raise KernelError("kl is not a scalar", got=tuple(point.shape), expected="()", fix="take the mean")
    point = point.clamp(min=0)
    ratio = log_probs - ref_log_probs.detach()
    sign = torch.where(desirable, 1.0, -1.0).to(ratio.dtype)
    good = desirable.to(ratio.dtype)
    weights = desirable_weight * good + undesirable_weight * (1 - good)
    losses = weights * torch.sigmoid(-beta * sign * (ratio - point))  # 1 - sigmoid(v) is sigmoid(-v)
    rewards = beta * ratio.detach()
    metrics = KtoMetrics(rewards, masked_mean(rewards, desirable), masked_mean(rewards, ~desirable), point)
    return reduced(losses, reduction), metrics
