"""Rules that a config of AlphaFold must keep, checked before memory is allocated and ranks start."""

from __future__ import annotations

from pathlib import Path

from cai_apps.applications.protein.config import Config
from cai_apps.applications.protein.design import sizes_for
from cai_apps.config import validation
from cai_mesh.errors import ConfigError

RANGES = {
    "data.residues": 1,
    "data.sequences": 1,
    "data.extra": 1,
    "data.templates": 0,
    "data.max_resolution": 0,
    "objective.rounds": 1,
    "objective.clamped": 0,
    "objective.masked": 0,
    "folding.every": 0,
}


def resolve(config: Config, world_size: int) -> Config:
    """The config with every open value worked out.

    Raises:
        ConfigError: a value is out of range, or does not go with another.
        MeshError: the degrees do not multiply to `world_size`.
    """
    validation.check_ranges(config, RANGES)
    config = validation.resolve(config, world_size)
    sizes_for(config)
    for name in ("clamped", "masked"):
        if getattr(config.objective, name) > 1:
            raise ConfigError(f"objective.{name} is no share", got=getattr(config.objective, name))
    if config.model.weights != "random" and not Path(config.model.weights).expanduser().is_file():
        raise ConfigError(
            f"no weights at {config.model.weights}",
            expected='"random", or a file of OpenFold (.pt) or AlphaFold (.npz)',
        )
    _check_parallel(config)
    return config


def _check_parallel(config: Config) -> None:
    parallel = config.parallel
    if parallel.pipeline.size > 1 or parallel.tensor.size > 1:
        raise ConfigError(
            "AlphaFold is trained by data parallelism and ZeRO",
            got=f"parallel.pipeline.size = {parallel.pipeline.size}, parallel.tensor.size = {parallel.tensor.size}",
            expected="1 of each",
            fix="raise parallel.shard, and parallel.zero to 3 where memory is short",
        )
    if config.precision.linear != "compute":
        raise ConfigError(
            "layers of AlphaFold are too narrow for products in 8 bits",
            got=f'precision.linear = "{config.precision.linear}"',
            fix='set precision.linear to "compute"',
        )
