"""cai doctor [--nvme DIRECTORY] [--json]"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cai_apps.config.arguments import parse
from cai_mesh.errors import ConfigError


@dataclass(frozen=True)
class Arguments:
    """Show what this machine offers: versions, devices, backends, memory, links, kernels, disk."""

    nvme: Path | None = None
    """A directory to test as memory.nvme: 256 MB are written and read."""
    json: bool = False
    """Print one JSON object: for each section its rows as [name, value]."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="doctor")
    from cai_apps.report.machine import SECTIONS, nvme

    sections = dict(SECTIONS)
    if options.nvme is not None:
        directory = options.nvme.expanduser()
        if not directory.is_dir():
            raise ConfigError(
                f"--nvme is not a directory: {directory}", expected="an existing one on a local disk"
            )
        sections["nvme"] = lambda: nvme(directory)
    if options.json:
        print(json.dumps({title: rows() for title, rows in sections.items()}))
        return 0
    for title, rows in sections.items():
        print(title)
        for name, value in rows():
            print(f"  {name:<15} {value}")
    return 0
