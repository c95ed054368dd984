"""The kinds of model that `cai train` trains, each in a package of its own, found in one table.

A config says which one it is for by its top-level key `application`; without one it is for "language". An
application imports the rooms (compose, run, data, planner, report), never another application.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cai_apps.config.file import parse
from cai_mesh.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from cai_apps.planner.shown import Shown
    from cai_apps.report.page import Page
    from cai_apps.run.files.directory import RunDirectory

DEFAULT = "language"
TABLE = {
    "language": "cai_apps.applications.language",
    "alignment": "cai_apps.applications.alignment",
    "diffusion": "cai_apps.applications.diffusion",
    "classification": "cai_apps.applications.classification",
    "protein": "cai_apps.applications.protein",
    "recsys": "cai_apps.applications.recsys",
}
"""Modules that hold an `APPLICATION`, by its name. Importing one loads neither torch nor transformers."""


@dataclass(frozen=True)
class Application:
    """What an application brings. What is trained by the shared loop also has a `cai_apps.run.task.Task`.

    Args:
        name: its key in `TABLE`, and the value of `application` in a config.
        config: the dataclass of its TOML file.
        check: raises CaiError for a config that cannot run, as far as can be told without torch and transformers.
        train: (config, label, keys given for this very start; None: all) -> the run's directory.
        plan: (config, ranks or None, label, bytes of a device or None) -> what a run will need.
        report: the contents of a run's page.
        memory: (config of a run) -> bytes of its fullest rank by kind of tensor, as planned; None: there is no plan.
        commands: its own commands of `cai`: name -> (one line of help, module with `run(arguments)`).
    """

    name: str
    config: type
    check: Callable[[Any], None]
    train: Callable[[Any, str, Collection[str] | None], RunDirectory]
    plan: Callable[[Any, int | None, str, int | None], Shown]
    report: Callable[[], Page]
    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    memory: Callable[[Any], Mapping[str, int]] | None = None


def find(name: str) -> Application:
    """The application of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TABLE:
        raise ConfigError(
            f"no application {name!r}", expected=" or ".join(sorted(TABLE)), fix=did_you_mean(name, TABLE)
        )
    return importlib.import_module(TABLE[name]).APPLICATION


def of(config: Any) -> Application:
    """The application of a config."""
    return find(config.application)


def commands() -> dict[str, dict[str, tuple[str, str]]]:
    """The commands of all applications: name -> application -> (line of help, module)."""
    commands_by_name: dict[str, dict[str, tuple[str, str]]] = {}
    for application in TABLE:
        for name, command in find(application).commands.items():
            commands_by_name.setdefault(name, {})[application] = command
    return commands_by_name


def run_of(path: Path) -> Path | None:
    """The directory of the run that a path is, or whose checkpoint it is; None: it is neither."""
    path = path.absolute()
    above = [path.parent] if path.name == "best" else []
    above += [path.parent.parent] if path.parent.name in ("checkpoints", "best") else []
    directories = (path, *above)
    return next((directory for directory in directories if (directory / "config.toml").is_file()), None)


def of_directory(directory: Path) -> str:
    """The name of the application whose run, or whose exported model, a directory is; `DEFAULT` where nobody says."""
    config = directory / "config.toml"
    if config.is_file():
        return str(parse(config).get("application", DEFAULT))
    if (directory / "model_index.json").is_file():
        return "diffusion"
    return "classification" if _classifies(directory / "config.json") else DEFAULT


def _classifies(config: Path) -> bool:
    """Whether the config of a model of transformers is of one with classes; a reward model has one number."""
    try:
        table = json.loads(config.read_text(encoding="utf-8"))
        kinds = [str(name) for name in table["architectures"]]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    ends = ("ForSequenceClassification", "ForImageClassification")
    return any(kind.endswith(ends) for kind in kinds) and len(table.get("id2label") or (0, 1)) > 1
