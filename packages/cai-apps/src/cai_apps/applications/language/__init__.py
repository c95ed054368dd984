"""Causal language models of transformers, trained on text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_apps.applications import Application
from cai_apps.applications.language.config import Config
from cai_apps.applications.loop import SharedLoop

if TYPE_CHECKING:
    from cai_apps.report.page import Page
    from cai_apps.run.task import Task


PRELOAD = ("transformers", "cai_apps.applications.language.task", "transformers.models.llama.modeling_llama")
"""Modules that the ranks of a run on one machine share."""


def _check(config: Config) -> None:
    from cai_apps.applications.language.rules import check

    check(config)


def _task() -> Task:
    from cai_apps.applications.language.task import LANGUAGE

    return LANGUAGE


def _batch(config: Config) -> str:
    return f"{config.train.global_batch} sequences of {config.data.sequence_length}"


def _report() -> Page:
    from cai_apps.report.training import training_page

    return training_page("tokens")


LOOP = SharedLoop(_task, _batch, preload=PRELOAD)
APPLICATION = Application(
    "language",
    Config,
    _check,
    LOOP.train,
    LOOP.plan,
    _report,
    memory=LOOP.memory,
    commands={
        "data": (
            "look through data before training: data stats FILE, or data check FILE for conversations",
            "cai_apps.applications.language.commands.data",
        ),
        "export": (
            "write a checkpoint's weights as an HF directory",
            "cai_apps.applications.language.commands.export",
        ),
        "evaluate": (
            "measure a model on held-out data or on tasks",
            "cai_apps.applications.language.commands.evaluate",
        ),
        "generate": (
            "continue a prompt with an exported model",
            "cai_apps.applications.language.commands.generate",
        ),
    },
)
