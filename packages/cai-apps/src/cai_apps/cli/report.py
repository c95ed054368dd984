"""cai report RUN_DIR"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cai_apps import applications, recipes
from cai_apps.config.arguments import parse
from cai_apps.run.files.directory import RunDirectory
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
    if options.output is not None and options.output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            "--output is no name of a page", got=repr(str(options.output)), expected="as report.html"
        )
    from cai_apps.report.page import write_report

    run_directory = RunDirectory.open(options.directory)
    page = applications.of(recipes.read(run_directory.config_file)).report()
    print(write_report(run_directory, options.output or run_directory.path / "report.html", page))
    return 0
