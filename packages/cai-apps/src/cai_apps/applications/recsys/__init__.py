"""Recommendation models: DLRM over cached embedding tables, on synthetic clicks, in one process."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from cai_apps.applications import Application
from cai_apps.applications.recsys.config import RecsysConfig

if TYPE_CHECKING:
    from cai_apps.planner.shown import Shown
    from cai_apps.report.page import Page
    from cai_apps.run.files.directory import RunDirectory


def _check(config: RecsysConfig) -> None:
    from cai_apps.applications.recsys.rules import check

    check(config)


def _train(config: RecsysConfig, label: str, explicit_keys: Collection[str] | None) -> RunDirectory:
    from cai_apps.applications.recsys.train import train

    return train(config, label=label)


def _plan(config: RecsysConfig, ranks: int | None, label: str, memory: int | None) -> Shown:
    from cai_apps.applications.recsys.plan import plan

    return plan(config, ranks, label, memory)


def _report() -> Page:
    from cai_apps.applications.recsys.report import PAGE

    return PAGE


APPLICATION = Application("recsys", RecsysConfig, _check, _train, _plan, _report)
