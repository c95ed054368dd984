"""What a model says of the answers in rows of several documents: one number for each document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cai_apps.compose.losses import IGNORED, NextTokenLoss
from cai_mesh.comm import gather_from, reduce_from


def document_sums(values: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """Return the sums of values over the documents of rows.

    Args:
        values: [b, K].
        places: the place of each value in its row, int64 [b, K].
        starts: the first place of each document, and S for those that a row does not have, int [b, D + 1].

    Returns [b, D] in the dtype of the values, 0 for a document without any.
    """
    inside = (places[:, None] >= starts[:, :-1, None]) & (places[:, None] < starts[:, 1:, None])
    return torch.where(inside, values[:, None], 0.0).sum(-1)


def last_values(values: Tensor, starts: Tensor, places: Tensor | None = None) -> Tensor:
    """Return the values [b, D] at the last token of each document; of one without tokens any value of the row.

    Args:
        values: [b, S].
        starts: as `document_sums` has them.
        places: the place of each value in its row, [b, S], where a rank has a part of it: 0 stands for the last tokens
            of the others; None: all are there, in order.
    """
    last = (starts[:, 1:].long() - 1).clamp(min=0)
    if places is None:
        return values.gather(1, last)
    return torch.where(places[:, None] == last[:, :, None], values[:, None], 0.0).sum(-1)


@dataclass(frozen=True)
class Scorer:
    """Scores of the documents of rows: of their scored tokens, or a value head's number at their last token.

    Args:
        tokens: the loss that knows how logits are cut over ranks.
        form: "sum" or "mean" of log-probabilities of tokens with a label, or "value".
        shares_prompts: whether the first of three documents is what a pair's answers go on from, and has no score.
        context: the ranks that have rows together, each the tokens of some places; None: rows are whole.
    """

    tokens: NextTokenLoss
    form: Literal["sum", "mean", "value"]
    shares_prompts: bool = False
    context: dist.ProcessGroup | None = None

    def __call__(self, output: Any, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the scores of this rank's samples, [b, D] (of pairs that share prompts [b, 2 U]), float32 or wider.

        Ranks that have rows together add up what each has of a document, and all have its score.

        Args:
            output: the model's output, with `logits` [b, S, V], or [b, S, 1] of a value head.
            rows: "labels" [b, S], "scored" [b, K] and "cu_seqlens" [b, D + 1] of these samples, and where ranks have
                rows together "places" [b, S], the place of each token in its row.
        """
        starts = rows["cu_seqlens"]
        if self.form == "value":
            values = output.logits.squeeze(-1)
            wide = values.to(torch.promote_types(values.dtype, torch.float32))
            return self._answers(last_values(wide, starts, rows.get("places")))
        log_probs = self.tokens.log_probs(output, rows["labels"], rows["scored"])
        sums = self._answers(document_sums(log_probs, _places_of(rows), starts))
        return sums if self.form == "sum" else sums / self.lengths(rows).clamp_min(1)

    def lengths(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the number of scored tokens of each document that has a score, float32."""
        has_label = rows["labels"].gather(1, rows["scored"]) != IGNORED
        return self._answers(document_sums(has_label.float(), _places_of(rows), rows["cu_seqlens"]))

    def _answers(self, values: Tensor) -> Tensor:
        """Return those of values of documents, [b, D], that are of answers, added up over the ranks of a context."""
        values = reduce_from(values, self.context)
        if not self.shares_prompts:
            return values
        return values[:, : values.shape[1] // 3 * 3].unflatten(1, (-1, 3))[..., 1:].flatten(1)

    def own(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of rows that this rank's samples have."""
        return {name: self.tokens.form.own(value) if value.dim() else value for name, value in rows.items()}

    def of_all(self, output: Any, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the scores of all samples, float64 [B, D]."""
        return gather_from(self(output, self.own(rows)), 0, self.tokens.form.samples).double()


def _places_of(rows: Mapping[str, Tensor]) -> Tensor:
    """Return the places of scored tokens in their rows, [b, K]."""
    return rows["places"].gather(1, rows["scored"]) if "places" in rows else rows["scored"]
