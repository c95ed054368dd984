"""Causal language models of transformers, trained on text."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from cai_apps.applications import Application
from cai_apps.applications.language.config import Config

if TYPE_CHECKING:
    from cai_apps.planner.shown import Shown
    from cai_apps.report.page import Page
    from cai_apps.run.files.directory import RunDirectory


PRELOAD = ("transformers", "cai_apps.applications.language.task", "transformers.models.llama.modeling_llama")
"""Modules that the ranks of a run on one machine share."""


def _check(config: Config) -> None:
    from cai_apps.applications.language.rules import check

    check(config)


def _train(config: Config, label: str, given: Collection[str] | None) -> RunDirectory:
    from cai_apps.applications.language.task import LANGUAGE
    from cai_apps.run.train import train

    return train(LANGUAGE, config, label=label, meant=given, preload=PRELOAD)


def _plan(config: Config, ranks: int | None, label: str, memory: int | None) -> Shown:
    from cai_apps.applications.language.task import LANGUAGE
    from cai_apps.config.validation import ranks_of
    from cai_apps.planner.fit import Planner
    from cai_apps.planner.text import show_plan

    return show_plan(
        Planner(LANGUAGE.resolve, LANGUAGE.workload),
        config,
        ranks=ranks_of(config) if ranks is None else ranks,
        memory=memory,
        title=f"{label}: {config.model.name}",
        batch=f"{config.train.global_batch} sequences of {config.data.sequence_length}",
    )


def _report() -> Page:
    from cai_apps.report.training import training_page

    return training_page("tokens")


APPLICATION = Application(
    "language",
    Config,
    _check,
    _train,
    _plan,
    _report,
    commands={
        "export": (
            "write a checkpoint's weights as an HF directory",
            "cai_apps.applications.language.commands.export",
        ),
        "generate": (
            "continue a prompt with an exported model",
            "cai_apps.applications.language.commands.generate",
        ),
    },
)
