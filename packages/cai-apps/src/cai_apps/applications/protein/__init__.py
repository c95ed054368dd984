"""AlphaFold: the structure of a protein from its sequence and those related to it."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from cai_apps.applications import Application
from cai_apps.applications.protein.config import Config
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from cai_apps.planner.shown import Shown
    from cai_apps.report.page import Page
    from cai_apps.run.files.directory import RunDirectory


def need_gemmi() -> None:
    """Raises ConfigError where the package that reads structures is not installed."""
    if importlib.util.find_spec("gemmi") is None:
        raise ConfigError("reading structures needs gemmi", fix="pip install 'cai-apps[protein]'")


def _check(config: Config) -> None:
    from cai_apps.applications.protein.rules import check

    check(config)


def _train(config: Config, label: str, given: Collection[str] | None) -> RunDirectory:
    need_gemmi()
    from cai_apps.applications.protein.task import PROTEIN
    from cai_apps.run.train import train

    return train(PROTEIN, config, label=label, meant=given)


def _plan(config: Config, ranks: int | None, label: str, memory: int | None) -> Shown:
    from cai_apps.applications.protein.task import PROTEIN
    from cai_apps.config.validation import ranks_of
    from cai_apps.planner.fit import Planner
    from cai_apps.planner.text import show_plan

    data = config.data
    return show_plan(
        Planner(PROTEIN.resolve, PROTEIN.workload),
        config,
        ranks=ranks_of(config) if ranks is None else ranks,
        memory=memory,
        title=f"{label}: {config.model.name}",
        batch=f"{config.train.global_batch} chains of {data.residues} residues, {data.sequences} sequences of each"
        f" and {data.extra} more",
    )


def _report() -> Page:
    from cai_apps.applications.protein.report import show
    from cai_apps.report.training import training_page

    return replace(training_page("chains"), more=show)


APPLICATION = Application(
    "protein",
    Config,
    _check,
    _train,
    _plan,
    _report,
    commands={
        "fold": (
            "fold protein chains with AlphaFold",
            "cai_apps.applications.protein.commands.fold",
        ),
    },
)
