"""How a run stands after its validations: which was best, and whether training has stopped getting better.

As transformers' `EarlyStoppingCallback` counts: a loss is an improvement if it is lower than the lowest before it by
more than `min_delta`; after `patience` validations in a row that are none, the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cai_apps.config.sections import EarlyStopping


@dataclass(frozen=True)
class Standing:
    """The validations of a run so far.

    Args:
        loss: the lowest validation loss; None: there was no validation, or none was a number.
        step: the step after which it was measured.
        stale: the number of validations since the last improvement.
    """

    loss: float | None = None
    step: int = 0
    stale: int = 0

    def after(self, step: int, loss: float, options: EarlyStopping) -> Standing:
        """Return the standing after one validation more.

        Args:
            step: the step that it followed.
            loss: its loss; one that is no number is no improvement.
            options: the section of the config.
        """
        is_lower = loss == loss and (self.loss is None or loss < self.loss)
        improves = is_lower and (self.loss is None or self.loss - loss > options.min_delta)
        counted = replace(self, stale=0 if improves else self.stale + 1)
        return replace(counted, loss=loss, step=step) if is_lower else counted

    def ends(self, options: EarlyStopping) -> bool:
        """Whether a run ends here, before its last step."""
        return 0 < options.patience <= self.stale

    def reason(self, step: int, last: int, options: EarlyStopping) -> str:
        """Return the line of a run that ends after `step` of `last` steps."""
        best = (
            "no validation loss is a number" if self.loss is None else f"{self.loss:.4f} of step {self.step}"
        )
        return (
            f"stopped early after step {step} of {last}: {self.stale} validations in a row are no better than "
            f"the best, {best} (early_stopping.patience = {options.patience}); to train on, raise "
            "the patience or set it to 0"
        )
