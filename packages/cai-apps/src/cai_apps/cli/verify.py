"""cai verify CHECKPOINT [--json]"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cai_apps.config.arguments import parse


@dataclass(frozen=True)
class Arguments:
    """Read a checkpoint whole and compare every file with the digests of its manifest."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint (RUN_DIR/checkpoints/step-N)."""
    json: bool = False
    """Print one JSON object: "checkpoint" and "verified"; an error is one with "error"."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="verify")
    from cai_mesh import checkpoint

    checkpoint.verify(options.checkpoint.expanduser())
    if options.json:
        print(json.dumps({"checkpoint": str(options.checkpoint), "verified": True}))
    else:
        print(f"{options.checkpoint}: every file is as it was written")
    return 0
