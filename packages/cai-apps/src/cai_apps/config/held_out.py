"""Checks that there is something to validate on where a config validates, or waits for what a validation says."""

from __future__ import annotations

from cai_apps.config.sections import RunConfig
from cai_mesh.errors import ConfigError


def check_validation(config: RunConfig, fraction: float) -> None:
    """Raises ConfigError for validation without data.

    Args:
        fraction: part of the data that is kept for it.
    """
    if config.train.validate_every and not fraction:
        raise ConfigError(
            "there is nothing to validate on",
            got=f"train.validate_every = {config.train.validate_every}, data.validation_fraction = 0",
            fix="set data.validation_fraction, such as to 0.02, or train.validate_every to 0",
        )


def check_validates(config: RunConfig) -> None:
    """Raises ConfigError where something waits for validations and there are none."""
    options = {
        "checkpoint.best = true": config.checkpoint.best,
        f"early_stopping.patience = {config.early_stopping.patience}": config.early_stopping.patience,
    }
    waiting = next((name for name, is_set in options.items() if is_set), None)
    if waiting is not None and not config.train.validate_every:
        raise ConfigError(
            "the validation loss decides, and nothing is validated",
            got=f"{waiting}, train.validate_every = 0",
            fix="set train.validate_every to the steps between two validations",
        )
