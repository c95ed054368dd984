"""Applications that the shared loop trains: `train` and `plan` of each, written once over its task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cai_apps.planner.shown import Shown
    from cai_apps.run.files.directory import RunDirectory
    from cai_apps.run.task import Task


def _nothing(config: Any) -> None:
    """Needs nothing."""


def _model(config: Any) -> str:
    return config.model.name


@dataclass(frozen=True)
class SharedLoop:
    """`train` and `plan` of an `Application`, by its task.

    Args:
        task: loads the task; only then is torch loaded.
        batch: text that says of a config what a step takes, such as "8 sequences of 256".
        need: raises ConfigError where packages of a run are not installed.
        name: text that names what a config trains; the name of its model unless given.
        preload: modules that the ranks of a run on one machine share.
    """

    task: Callable[[], Task]
    batch: Callable[[Any], str]
    need: Callable[[Any], None] = _nothing
    name: Callable[[Any], str] = _model
    preload: Collection[str] = ()

    def train(self, config: Any, label: str, meant: Collection[str] | None) -> RunDirectory:
        self.need(config)
        task = self.task()
        from cai_apps.run.train import train

        return train(task, config, label=label, meant=meant, preload=self.preload)

    def plan(self, config: Any, ranks: int | None, label: str, memory: int | None) -> Shown:
        task = self.task()
        from cai_apps.config.validation import ranks_of
        from cai_apps.planner.fit import Planner
        from cai_apps.planner.text import show_plan

        return show_plan(
            Planner(task.resolve, task.workload),
            config,
            ranks=ranks_of(config) if ranks is None else ranks,
            memory=memory,
            title=f"{label}: {self.name(config)}",
            batch=self.batch(config),
        )

    def memory(self, config: Any) -> Mapping[str, int]:
        """Return bytes of the fullest rank of a run by kind of tensor, as planned; empty for an offloaded run."""
        if config.memory.residency != "device":
            return {}
        task = self.task()
        from cai_apps.config.validation import ranks_of
        from cai_apps.planner.drawing import kinds_of
        from cai_apps.planner.fit import Planner

        stages = Planner(task.resolve, task.workload).plan(config, ranks=ranks_of(config)).stages
        return kinds_of(max(stages, key=lambda stage: stage.peak))
