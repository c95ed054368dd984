"""The options of a cross-entropy as its kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN, LOGIT_SUM, ENTROPY = 0, 1, 2
"""The statistic a scan of a row keeps besides maximum and sum of exponentials: none, the sum of the logits, or what
the entropy needs."""


@dataclass(frozen=True)
class LossOptions:
    """Options of `cross_entropy` without its reduction.

    Args:
        ignore_index: the target of rows that do not count.
        label_smoothing: share of the target's probability given to all classes.
        z_loss: weight of the squared log-sum-exp.
        softcap: cap of the logits, 0 for none.
    """

    ignore_index: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0

    @property
    def statistic(self) -> int:
        """The statistic that a scan has to keep for this loss: LOGIT_SUM or PLAIN."""
        return LOGIT_SUM if self.label_smoothing else PLAIN

    def arguments(self) -> dict[str, float]:
        """The fields as keyword arguments of an operator."""
        return {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
        }
