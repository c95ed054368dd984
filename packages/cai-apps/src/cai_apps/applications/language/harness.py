"""Tasks of lm-evaluation-harness on a model as cai opens it: adapters, quantized bases, checkpoints of runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cai_apps.applications.language.generate import Place
from cai_mesh.errors import ConfigError

PACKAGE = "lm_eval"


def need_harness() -> None:
    """Raise ConfigError where lm-evaluation-harness is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError("--lm-eval needs lm-evaluation-harness", fix="pip install 'cai-apps[evaluation]'")


def evaluate_tasks(
    place: Place,
    tasks: Sequence[str],
    *,
    batch: int,
    length: int | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    folder: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the numbers of tasks by the names of both.

    Args:
        place: the directories of the model.
        tasks: the names of the tasks.
        batch: the number of requests of one forward.
        length: the most tokens that the model is given; None: its positions.
        limit: the number of examples of each task; None: all.
        fewshot: the number of examples before each question; None: as the task says.
        folder: a folder with further tasks.

    Raises:
        ConfigError: there is no such task, or the model cannot be opened.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from cai_apps.applications.language.harness_model import HarnessModel

    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"lm-evaluation-harness has no task {unknown[0]!r}",
            fix="`lm_eval ls tasks` lists them; --task-folder names a folder with more",
        )
    outcome: Any = simple_evaluate(
        HarnessModel(place, batch, length),
        tasks=list(tasks),
        num_fewshot=fewshot,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    return outcome["results"]


def table_of(numbers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each number of each task."""
    return [
        f"{task}  {name.removesuffix(',none')}  {value:.4f}"
        for task, values in numbers.items()
        for name, value in values.items()
        if isinstance(value, float) and "stderr" not in name
    ]
