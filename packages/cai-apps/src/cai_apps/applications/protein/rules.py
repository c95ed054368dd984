"""Rules that a config of AlphaFold must keep. They need no torch."""

from __future__ import annotations

from pathlib import Path

from cai_apps.applications.protein.config import MODELS, Config
from cai_apps.config import validation
from cai_mesh.errors import ConfigError, did_you_mean


def check(config: Config) -> None:
    """Raises CaiError for what can be told of a config before anything is loaded."""
    validation.check(config)
    check_settings(config)


def check_settings(config: Config) -> None:
    """Raises ConfigError for what does not go together."""
    check_name(config.model.name)
    weights = config.model.weights
    if weights != "random" and not Path(weights).expanduser().is_file():
        raise ConfigError(
            f"no weights at {weights}", expected='"random", or a file of OpenFold (.pt) or AlphaFold (.npz)'
        )
    if config.train.validate_every and not config.data.validation:
        raise ConfigError(
            "there is nothing to validate on",
            got=f"train.validate_every = {config.train.validate_every}, data.validation names no chain",
            fix="set data.validation to names of chains, or train.validate_every to 0",
        )
    _check_parallel(config)


def check_name(name: str) -> None:
    """Raises ConfigError for a name that is no preset's."""
    if name not in MODELS:
        raise ConfigError(f"no model {name!r}", expected=" or ".join(MODELS), fix=did_you_mean(name, MODELS))


def _check_parallel(config: Config) -> None:
    parallel = config.parallel
    validation.refuse_context(config, "chains")
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
