"""Models of transformers that classify texts, pairs of texts, or pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_apps.applications import Application
from cai_apps.applications.classification.config import Config
from cai_apps.applications.loop import SharedLoop

if TYPE_CHECKING:
    from cai_apps.report.page import Page
    from cai_apps.run.task import Task


def _check(config: Config) -> None:
    from cai_apps.applications.classification.rules import check

    check(config)


def _task() -> Task:
    from cai_apps.applications.classification.task import CLASSIFICATION

    return CLASSIFICATION


def _batch(config: Config) -> str:
    return f"{config.train.global_batch} samples"


def _report() -> Page:
    from cai_apps.report.training import training_page

    return training_page("samples")


PRELOAD = ("transformers", "cai_apps.applications.classification.task")
"""Modules that the ranks of a run on one machine share."""
LOOP = SharedLoop(_task, _batch, preload=PRELOAD)
APPLICATION = Application(
    "classification",
    Config,
    _check,
    LOOP.train,
    LOOP.plan,
    _report,
    memory=LOOP.memory,
    commands={
        "evaluate": (
            "classify samples: accuracy, and each class's precision and recall",
            "cai_apps.applications.classification.commands.evaluate",
        ),
        "export": (
            "write a checkpoint's weights as an HF directory",
            "cai_apps.applications.classification.commands.export",
        ),
    },
)
