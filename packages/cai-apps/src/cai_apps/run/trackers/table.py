"""Trackers in a table: a row says what one is made by, and what has to be installed for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cai_apps.config.sections import Tracker
from cai_apps.run.trackers.event_files import EventFiles
from cai_apps.run.trackers.local_database import LocalDatabase
from cai_apps.run.trackers.weights_and_biases import WeightsAndBiases
from cai_apps.run.trackers.writer import Writer
from cai_mesh.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """One tracker.

    Args:
        open: makes its writer.
        rewinds: whether a writer takes steps again that were written before; else they are not given to it.
    """

    open: Callable[[], Writer]
    rewinds: bool = False


ROWS: dict[Tracker, Row] = {
    "tensorboard": Row(EventFiles, rewinds=True),
    "wandb": Row(WeightsAndBiases),
    "trackio": Row(LocalDatabase),
}
"""Each tracker by its name, which is that of its package and of the extra of cai-apps that brings it."""


def need(names: Iterable[str]) -> None:
    """Raise ConfigError where the package of a tracker is not installed."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if (
            spec is None or spec.origin is None
        ):  # a folder of that name is no package: wandb itself leaves one
            raise ConfigError(
                f"the tracker {name} is not installed",
                got=f'"{name}" among log.trackers',
                fix=f"pip install 'cai-apps[{name}]', or take it out of log.trackers",
            )
