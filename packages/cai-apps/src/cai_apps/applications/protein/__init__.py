"""AlphaFold: the structure of a protein from its sequence and those related to it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

from cai_apps.applications import Application
from cai_apps.applications.loop import SharedLoop
from cai_apps.applications.protein.config import Config
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from cai_apps.report.page import Page
    from cai_apps.run.task import Task


def need_gemmi() -> None:
    """Raises ConfigError where the package that reads structures is not installed."""
    if importlib.util.find_spec("gemmi") is None:
        raise ConfigError("reading structures needs gemmi", fix="pip install 'cai-apps[protein]'")


def _check(config: Config) -> None:
    from cai_apps.applications.protein.rules import check

    check(config)


def _task() -> Task:
    from cai_apps.applications.protein.task import PROTEIN

    return PROTEIN


def _batch(config: Config) -> str:
    data = config.data
    return (
        f"{config.train.global_batch} chains of {data.residues} residues, {data.sequences} sequences of each"
        f" and {data.extra} more"
    )


def _report() -> Page:
    from cai_apps.applications.protein.report import show
    from cai_apps.report.training import training_page

    return replace(training_page("chains"), more=show)


PRELOAD = ("cai_apps.applications.protein.task",)
"""Modules that the ranks of a run on one machine share."""
LOOP = SharedLoop(_task, _batch, need=lambda config: need_gemmi(), preload=PRELOAD)
APPLICATION = Application(
    "protein",
    Config,
    _check,
    LOOP.train,
    LOOP.plan,
    _report,
    memory=LOOP.memory,
    commands={
        "fold": (
            "fold protein chains with AlphaFold",
            "cai_apps.applications.protein.commands.fold",
        ),
    },
)
