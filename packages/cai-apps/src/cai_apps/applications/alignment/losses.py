"""The losses of the algorithms, on scores of answers: plain tensors in, one loss and the rewards of a unit out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cai_apps.applications.alignment.algorithms import ALGORITHMS
from cai_apps.applications.alignment.config import Alignment
from cai_kernels import DpoForm, dpo_loss, kto_loss, orpo_loss, reward_loss, simpo_loss


@dataclass(frozen=True)
class Pairs:
    """What is known of pairs of answers.

    Args:
        chosen: scores of the better answers, [N].
        rejected: scores of the others, [N].
        ref_chosen: the same of the reference model, [N]; None without one.
        ref_rejected: likewise.
        margin: margins by which the chosen answers are said to be better, [N]; 0 where nothing is said.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor | None
    ref_rejected: Tensor | None
    margin: Tensor


@dataclass(frozen=True)
class Judged:
    """What is known of single answers.

    Args:
        log_probs: scores of the answers, [N].
        reference: the same of the reference model, [N].
        desirable: whether they are good, bool [N].
        kl: mean log-ratio of prompts with answers to other prompts, over the whole step's batch, a scalar.
    """

    log_probs: Tensor
    reference: Tensor
    desirable: Tensor
    kl: Tensor


def beta_of(options: Alignment) -> float:
    """Return the weight that an algorithm's loss has."""
    usual = ALGORITHMS[options.algorithm].beta
    assert usual is not None
    return usual if options.beta is None else options.beta


PairLoss = Callable[[Pairs, Alignment], tuple[Tensor, Tensor, Tensor]]
"""(pairs, options) -> losses, rewards of the chosen and rewards of the rejected answers, [N] each."""


def _dpo(form: DpoForm) -> PairLoss:
    def loss(pairs: Pairs, options: Alignment) -> tuple[Tensor, Tensor, Tensor]:
        assert pairs.ref_chosen is not None and pairs.ref_rejected is not None
        losses, metrics = dpo_loss(
            pairs.chosen,
            pairs.rejected,
            pairs.ref_chosen,
            pairs.ref_rejected,
            beta=beta_of(options),
            form=form,
            label_smoothing=options.label_smoothing,
            reduction="none",
        )
        return losses, metrics.chosen_rewards, metrics.rejected_rewards

    return loss


def _simpo(pairs: Pairs, options: Alignment) -> tuple[Tensor, Tensor, Tensor]:
    margin = MARGIN if options.margin is None else options.margin
    losses, metrics = simpo_loss(
        pairs.chosen, pairs.rejected, beta=beta_of(options), margin=margin, reduction="none"
    )
    return losses, metrics.chosen_rewards, metrics.rejected_rewards


def _orpo(pairs: Pairs, options: Alignment) -> tuple[Tensor, Tensor, Tensor]:
    losses, metrics = orpo_loss(pairs.chosen, pairs.rejected, weight=beta_of(options), reduction="none")
    return losses, metrics.chosen_rewards, metrics.rejected_rewards


def _reward(pairs: Pairs, options: Alignment) -> tuple[Tensor, Tensor, Tensor]:
    losses, metrics = reward_loss(
        pairs.chosen, pairs.rejected, pairs.margin, center=options.center, reduction="none"
    )
    return losses, metrics.chosen_rewards, metrics.rejected_rewards


MARGIN = 1.0
"""The reward margin of SimPO where none is asked for."""
LOSSES: dict[str, PairLoss] = {
    "reward": _reward,
    "dpo": _dpo("sigmoid"),
    "dpo-hinge": _dpo("hinge"),
    "dpo-robust": _dpo("robust"),
    "ipo": _dpo("ipo"),
    "ipo-sum": _dpo("ipo"),
    "simpo": _simpo,
    "orpo": _orpo,
}
"""The losses of those algorithms that learn from pairs."""


def judged_loss(judged: Judged, options: Alignment) -> tuple[Tensor, Tensor]:
    """Return the losses of KTO and the rewards of the answers, [N] each."""
    losses, metrics = kto_loss(
        judged.log_probs,
        judged.reference,
        judged.desirable,
        judged.kl,
        beta=beta_of(options),
        desirable_weight=options.desirable_weight,
        undesirable_weight=options.undesirable_weight,
        reduction="none",
    )
    return losses, metrics.rewards
