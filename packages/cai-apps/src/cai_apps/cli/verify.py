"""cai verify CHECKPOINT"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cai_apps.cli.arguments import parse


@dataclass(frozen=True)
class Arguments:
    """Read a checkpoint whole and compare every file with the digests of its manifest."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint (RUN_DIR/checkpoints/step-N)."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="verify")
    from cai_mesh import checkpoint

    checkpoint.verify(options.checkpoint.expanduser())
    print(f"{options.checkpoint}: every file is as it was written")
    return 0
