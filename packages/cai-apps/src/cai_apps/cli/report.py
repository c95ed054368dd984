"""cai report RUN_DIR [RUN_DIR ...]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from cai_apps import applications, recipes
from cai_apps.config.arguments import parse
from cai_apps.config.sections import RunConfig
from cai_apps.run.files.directory import RunDirectory
from cai_mesh.errors import CaiError, ConfigError


@dataclass(frozen=True)
class Arguments:
    """Write one HTML file about a run: what came out, curves, memory, the pipeline, samples, how it was run. Of several
    runs, one that compares them. The file needs no network, and can be printed."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories: one, or those that are to be compared."""
    output: Path | None = None
    """The file to write. Default: report.html in the run directory, or comparison.html where you are."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="report")
    if options.output is not None and options.output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            "--output is no name of a page", got=repr(str(options.output)), expected="as report.html"
        )
    if not options.directories:
        raise ConfigError("cai report needs a run directory", expected="cai report RUN_DIR [RUN_DIR ...]")
    runs = [RunDirectory.open(directory) for directory in options.directories]
    configs = [recipes.read(run.config_file) for run in runs]
    application = applications.of(configs[0])
    if len(runs) == 1:
        from cai_apps.report.page import write_report

        output = options.output or runs[0].path / "report.html"
        print(write_report(runs[0], output, application.report(), _planned(runs[0], configs[0])))
        return 0
    for run_directory, config in zip(runs, configs, strict=True):
        if config.application != application.name:
            raise ConfigError(
                "runs of several applications cannot be compared",
                got=f"{run_directory.path} is of {config.application}",
                expected=f"runs of {application.name}, as {runs[0].path}",
            )
    from cai_apps.report.comparison import write_comparison

    print(write_comparison(runs, options.output or Path("comparison.html"), application.report()))
    return 0


def _planned(run_directory: RunDirectory, config: Any) -> Mapping[str, int]:
    """Return the bytes that a run was to take, by kind of tensor; empty where its model cannot be built any more."""
    from cai_apps.report.facts import on_cpu
    from cai_apps.run.files.starts import read_starts

    memory = applications.of(config).memory
    if memory is None or not isinstance(config, RunConfig):
        return {}
    if on_cpu(read_starts(run_directory)):
        config = replace(config, train=replace(config.train, device="cpu"))
    try:
        return memory(config)
    except CaiError as error:
        print(f"the page has no plan of the memory: {str(error).splitlines()[0]}")
        return {}
