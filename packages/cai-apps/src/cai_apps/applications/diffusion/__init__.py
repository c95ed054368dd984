"""Diffusion models of diffusers: Stable Diffusion's UNets, DiT and SD3, trained on images with captions or labels."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from cai_apps.applications import Application
from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.loop import SharedLoop
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from cai_apps.planner.shown import Shown
    from cai_apps.report.page import Page
    from cai_apps.run.task import Task


def need_diffusers() -> None:
    """Raises ConfigError where the packages of this application are not installed."""
    missing = [name for name, module in (("diffusers", "diffusers"), ("Pillow", "PIL")) if not _there(module)]
    if missing:
        raise ConfigError(
            f"diffusion models need {' and '.join(missing)}", fix="pip install 'cai-apps[diffusion]'"
        )


def _need(config: Config) -> None:
    """Raises ConfigError where a run's packages are not installed."""
    need_diffusers()
    if config.lora.rank:
        from cai_apps.compose.lora import need_peft

        need_peft()


def _there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _check(config: Config) -> None:
    from cai_apps.applications.diffusion.rules import check

    check(config)


def _task() -> Task:
    from cai_apps.applications.diffusion.task import DIFFUSION

    return DIFFUSION


def _batch(config: Config) -> str:
    return f"{config.train.global_batch} images of {config.data.size} x {config.data.size}"


def _plan(config: Config, ranks: int | None, label: str, memory: int | None) -> Shown:
    """The plan of the loop, and what tensor-parallel ranks share."""
    _need(config)
    from cai_apps.applications.diffusion.model.design import load_design
    from cai_apps.applications.diffusion.model.tensor_parallel import share_of

    plan = LOOP.plan(config, ranks, label, memory)
    share = share_of(config, load_design(config.model.name))
    if share is None:
        return plan
    return replace(plan, text=f"{plan.text}\ntensor    {share}", facts=plan.facts | {"tensor": asdict(share)})


def _report() -> Page:
    from cai_apps.applications.diffusion.sampling.gallery import show
    from cai_apps.report.training import training_page

    return replace(training_page("images"), more=show)


PRELOAD = ("transformers", "diffusers", "cai_apps.applications.diffusion.task")
"""Modules that the ranks of a run on one machine share."""
LOOP = SharedLoop(_task, _batch, need=_need, preload=PRELOAD)
APPLICATION = Application(
    "diffusion",
    Config,
    _check,
    LOOP.train,
    _plan,
    _report,
    memory=LOOP.memory,
    commands={
        "generate": (
            "draw pictures for prompts with a diffusion model",
            "cai_apps.applications.diffusion.commands.generate",
        ),
    },
)
