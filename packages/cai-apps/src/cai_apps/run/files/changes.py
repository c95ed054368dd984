"""Changes of a run's config since it began, and whether somebody means them."""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cai_apps.config import file as config_file
from cai_mesh.errors import ConfigError

FREE = (
    "parallel.*", "memory.*", "precision.master", "log.*", "checkpoint.*", "early_stopping.*", "sampling.*",
    "folding.*", "data.cache", "train.steps", "train.device", "train.compile", "train.kernels", "train.microbatch_size",
    "train.validate_every", "train.validation_batches", "reference.form", "experts.show",
)  # fmt: skip
"""Keys that say where, how and for how long a run is computed, and what is shown: a step learns what it would have."""

ROUNDS = ("parallel.wire_*", "parallel.pipeline.wire")
"""Keys of these forms are not free: what travels is rounded."""

FOLLOWS = {"lr_schedule.decay_steps": "train.steps", "lr_schedule.warmup_steps": "train.steps"}
"""Keys that are worked out from another where they are not set: whoever means that one means them."""

Changes = dict[str, tuple[Any, Any]]
"""The two values by key: what the run has, what is asked for."""


def changes(file: Path, config: Any) -> Changes:
    """Return what differs between a run's config.toml and a resolved config, by dotted key; keys of `log` are left out.

    A key that the file lacks, as one of an older version may, counts as its default.
    """
    default = _flat(tomllib.loads(config_file.to_toml(type(config)())))
    old = default | _flat(config_file.parse(file))
    new = default | _flat(tomllib.loads(config_file.to_toml(config)))
    differ = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
    return {key: differ[key] for key in sorted(differ) if not key.startswith("log.")}


def check(differences: Changes, directory: Path, meant: Collection[str] | None) -> None:
    """Refuse changes that nobody has asked for.

    Args:
        differences: the changes that `changes` returns.
        directory: the run's directory.
        meant: keys that were given for this very start; None: all of the config was.

    Raises:
        ConfigError: a key that is neither meant nor in `FREE` differs.
    """
    if meant is None:
        return
    wrong = {
        key: pair
        for key, pair in differences.items()
        if not (_is_free(key) or key in meant or FOLLOWS.get(key) in meant)
    }
    if wrong:
        raise ConfigError(
            f"{directory} holds a run with another config, and checkpoints to go on from",
            got="\n             ".join(lines(wrong)),
            expected="the config it began with",
            fix=f"go on with `cai train {directory / 'config.toml'}`, give each key on the command line if you mean "
            "it, or choose another log.directory",
        )


def lines(differences: Changes) -> list[str]:
    """Return a line `key: old -> new` for each change."""
    return [f"{key}: {_shown(old)} -> {_shown(new)}" for key, (old, new) in differences.items()]


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def _is_free(key: str) -> bool:
    free, rounds = (any(fnmatch.fnmatchcase(key, pattern) for pattern in keys) for keys in (FREE, ROUNDS))
    return free and not rounds


def _flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    values_by_key: dict[str, Any] = {}
    for key, value in table.items():
        values_by_key |= (
            _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
        )
    return values_by_key
