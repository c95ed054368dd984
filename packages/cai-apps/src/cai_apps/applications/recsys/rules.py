"""Rules that a recommendation config must keep. They need no torch."""

from __future__ import annotations

import os

from cai_apps.applications.recsys.config import RecsysConfig
from cai_apps.config import ranges
from cai_apps.config.environment import launched
from cai_mesh.errors import ConfigError


def check(config: RecsysConfig) -> None:
    """Raises ConfigError for numbers out of their range, sizes that do not fit each other, and several ranks."""
    ranges.check(config)
    if launched() and os.environ["WORLD_SIZE"] != "1":
        raise ConfigError(
            "a recommendation recipe trains in one process", got=f"{os.environ['WORLD_SIZE']} ranks"
        )
    bottom = widths(config.model.bottom, "model.bottom")
    widths(config.model.top, "model.top")
    if bottom[-1] != config.tables.dim:
        raise ConfigError(
            "the last of model.bottom is not tables.dim", got=bottom[-1], expected=config.tables.dim
        )


def widths(text: str, key: str) -> list[int]:
    """The numbers of "64,32". Raises `ConfigError` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 2**31 for part in parts):
        raise ConfigError(f"{key} is not a list of widths", got=repr(text), expected='numbers, as "64,32"')
    return [int(part) for part in parts]
