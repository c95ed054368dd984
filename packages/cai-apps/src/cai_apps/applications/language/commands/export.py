"""cai export RUN_DIR|CHECKPOINT DIR [--merge]"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from cai_apps.config.arguments import parse
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from cai_apps.applications.language.task import LanguageTask


def _language() -> LanguageTask:
    from cai_apps.applications.language.task import LANGUAGE

    return LANGUAGE


@dataclass(frozen=True)
class Arguments:
    """Write a checkpoint's weights as an HF directory; of a run with adapters, the adapters as a folder of peft."""

    source: Annotated[Path, tyro.conf.Positional]
    """Run directory (its newest checkpoint) or one of its checkpoints."""
    directory: Annotated[Path, tyro.conf.Positional]
    """The directory to write: an HF directory, or a folder of peft."""
    merge: bool = False
    """Write the whole model of a run with adapters as an HF directory, with the adapters in its weights."""


def run(arguments: list[str], task: Callable[[], LanguageTask] = _language) -> int:
    """Run the command for the runs of a task, which is loaded once the arguments are right."""
    options = parse(Arguments, arguments, command="export")
    if not options.directory.name:
        raise ConfigError(
            "the directory to write has no name", got=repr(str(options.directory)), expected="a new one's"
        )
    from cai_apps.applications.language.export import export

    print(export(options.source, options.directory, merge=options.merge, task=task()))
    return 0
