"""cai export RUN_DIR|CHECKPOINT DIR [--merge], of a run that classifies"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cai_apps.config.arguments import parse
from cai_mesh.errors import ConfigError


@dataclass(frozen=True)
class Arguments:
    """Write a checkpoint's weights as an HF directory; of a run with adapters, the adapters as a folder of peft."""

    source: Annotated[Path, tyro.conf.Positional]
    """Run directory (its newest checkpoint) or one of its checkpoints."""
    directory: Annotated[Path, tyro.conf.Positional]
    """The directory to write."""
    merge: bool = False
    """Write the whole model of a run with adapters as an HF directory, with the adapters in its weights."""


def run(arguments: list[str]) -> int:
    """Run the command for runs that classify."""
    options = parse(Arguments, arguments, command="export")
    if not options.directory.name:
        raise ConfigError(
            "the directory to write has no name", got=repr(str(options.directory)), expected="a new one's"
        )
    from cai_apps.applications.classification.export import export

    print(export(options.source, options.directory, merge=options.merge))
    return 0
