"""cai report RUN_DIR"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cai_apps.cli.arguments import parse
from cai_apps.recsys import recipes as recsys
from cai_apps.run_directory import RunDirectory
from cai_mesh.errors import ConfigError


@dataclass(frozen=True)
class Arguments:
    """Write one HTML file about a run: curves, configuration, pipeline chart."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Run directory."""
    output: Path | None = None
    """The file to write; report.html in the run directory unless given."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="report")
    from cai_apps.report.page import write_report

    run_directory = RunDirectory.open(options.directory)
    if recsys.takes(str(run_directory.config_file)):
        raise ConfigError(
            "cai report draws runs of language models",
            got=f"a recommendation run, {run_directory.path}",
            fix="its losses are in metrics.jsonl",
        )
    print(write_report(run_directory, options.output or run_directory.path / "report.html"))
    return 0
