"""Checks a config of AlphaFold before memory is allocated and ranks start."""

from __future__ import annotations

from cai_apps.applications.protein.config import Config
from cai_apps.applications.protein.design import sizes_for
from cai_apps.applications.protein.rules import check_settings
from cai_apps.config import validation


def resolve(config: Config, world_size: int) -> Config:
    """The config with every open value worked out.

    Raises:
        ConfigError: a value is out of range, or does not go with another.
        MeshError: the degrees do not multiply to `world_size`.
    """
    config = validation.resolve(config, world_size)
    check_settings(config)
    sizes_for(config)
    return config
