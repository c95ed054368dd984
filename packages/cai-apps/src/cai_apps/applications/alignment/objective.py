"""The loss of rows of answers, summed over their units, and what it measures beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.applications.alignment.algorithms import ALGORITHMS
from cai_apps.applications.alignment.config import Alignment, Config
from cai_apps.applications.alignment.losses import LOSSES, Judged, Pairs, judged_loss
from cai_apps.applications.alignment.scores import Scorer
from cai_apps.compose.losses import NextTokenLoss
from cai_mesh.comm import degree, group

OF_PAIRS = (
    "rewards/accuracies",
    "rewards/margins",
    "rewards/chosen",
    "rewards/rejected",
    "lengths/chosen",
    "lengths/rejected",
)
OF_VALUES = ("rewards/confidence",)
"""The mean probability that a reward model gives to the answer it prefers: one that is calibrated has its accuracy."""
OF_ANSWERS = ("logps/chosen", "logps/rejected")
OF_REFERENCE = ("log_ratios/chosen", "log_ratios/rejected")
OF_JUDGED = (
    "rewards/chosen",
    "rewards/rejected",
    "lengths/chosen",
    "lengths/rejected",
    "logps/chosen",
    "logps/rejected",
    "kl",
)


def measures_of(options: Alignment) -> tuple[str, ...]:
    """Return the names of what the loss of an algorithm measures, in their order."""
    algorithm = ALGORITHMS[options.algorithm]
    if algorithm.units == "judged":
        return OF_JUDGED
    answers = OF_ANSWERS if algorithm.score != "value" else OF_VALUES
    return (*OF_PAIRS, *answers, *(OF_REFERENCE if algorithm.reference else ()))


@dataclass(frozen=True)
class Objective:
    """The loss of an algorithm: (output, rows) -> the sum of the losses of the rows' units.

    Args:
        options: the algorithm and its options.
        scorer: the scores of the model.
    """

    options: Alignment
    scorer: Scorer

    @classmethod
    def of(cls, model: nn.Module, mesh: DeviceMesh, config: Config) -> Objective:
        """Return the loss of a config for a model that is cut over the ranks of a mesh."""
        tokens = NextTokenLoss.of(model, mesh, config.parallel.tensor.mode, config.train.kernels)
        options = config.alignment
        context = group(mesh, ("cp",)) if degree(mesh, "cp") > 1 else None
        scorer = Scorer(tokens, ALGORITHMS[options.algorithm].score, options.share_prompts, context)
        return cls(options, scorer)

    def __call__(self, output: Any, rows: Mapping[str, Tensor]) -> Tensor:
        return self.measured(output, rows)[0]

    def measured(self, output: Any, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar of float32 or wider, and numerators and denominators, float64 [2, measures].

        Args:
            output: the model's output, with logits in the form of the ranks.
            rows: the target of a microbatch: "labels", "cu_seqlens", "present", and what the algorithm reads besides
                ("reference", "margin", "desirable", "kl"), of all samples.
        """
        local_rows = self.scorer.own(rows)
        scores = self.scorer(output, local_rows)
        is_judged = ALGORITHMS[self.options.algorithm].units == "judged"
        losses, ratios = (self._judged if is_judged else self._paired)(scores, local_rows)
        sums = torch.stack([torch.stack(pair) for pair in ratios], dim=1)
        return self._once(self._summed(losses, local_rows["present"]), self.scorer.tokens.form.summed(sums))

    def _once(self, loss: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return both as they count where all ranks of a context have them: on the first, and its gradient on all."""
        if self.scorer.context is None or self.scorer.context.rank() == 0:
            return loss, sums
        return loss - loss.detach(), torch.zeros_like(sums)

    def _summed(self, losses: Tensor, present: Tensor) -> Tensor:
        return self.scorer.tokens.form.summed(torch.where(present, losses, 0.0).sum())

    def _paired(
        self, scores: Tensor, rows: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the losses [b, U] of pairs and (numerator, denominator) of each measure."""
        algorithm, present = ALGORITHMS[self.options.algorithm], rows["present"]
        chosen, rejected = _sides(scores, present)
        ref_chosen = ref_rejected = None
        if algorithm.reference:
            ref_chosen, ref_rejected = _sides(rows["reference"], present)
        pairs = Pairs(
            *(
                None if side is None else side.flatten()
                for side in (chosen, rejected, ref_chosen, ref_rejected)
            ),  # type: ignore[arg-type]
            rows["margin"].flatten(),
        )
        losses, better, worse = LOSSES[self.options.algorithm](pairs, self.options)
        better, worse = better.view(present.shape), worse.view(present.shape)
        values = [
            _won(better, worse),
            better - worse,
            better,
            worse,
            *_sides(self.scorer.lengths(rows), present),
        ]
        values += [(better - worse).abs().sigmoid()] if algorithm.score == "value" else [chosen, rejected]
        if ref_chosen is not None and ref_rejected is not None:
            values += [chosen - ref_chosen, rejected - ref_rejected]
        return losses.view(present.shape), [_ratio(value, present) for value in values]

    def _judged(
        self, scores: Tensor, rows: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the losses [b, U] of judged answers and (numerator, denominator) of each measure."""
        present, desirable = rows["present"], rows["desirable"]
        units = present.shape[1]
        log_probs, reference = scores[:, :units], rows["reference"][:, :units].to(scores.dtype)
        judged = Judged(log_probs.flatten(), reference.flatten(), desirable.flatten(), rows["kl"])
        losses, rewards = judged_loss(judged, self.options)
        good, bad = present & desirable, present & ~desirable
        values = rewards.view(present.shape), self.scorer.lengths(rows)[:, :units], log_probs
        ratios = [_ratio(value, side) for value in values for side in (good, bad)]
        return losses.view(present.shape), [*ratios, _ratio(rows["kl"].expand(present.shape), present)]


def _sides(values: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return those of the chosen and those of the rejected answers, [b, U] each, of documents [b, 2 U or more]."""
    chosen, rejected = values[:, : 2 * present.shape[1]].unflatten(1, (-1, 2)).unbind(-1)
    return chosen, rejected


def _won(better: Tensor, worse: Tensor) -> Tensor:
    """Return 1 where the chosen answer has the larger reward, a half where they are equal, else 0."""
    return ((better - worse).sign() + 1) / 2


def _ratio(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the values that count, and their number, float64 scalars."""
    return torch.where(counted, values.detach().double(), 0.0).sum(), counted.double().sum()
