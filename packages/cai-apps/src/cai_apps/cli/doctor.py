"""cai doctor"""

from __future__ import annotations

from dataclasses import dataclass

from cai_apps.cli.arguments import parse


@dataclass(frozen=True)
class Arguments:
    """Show what this machine offers: versions, devices, backends, links, kernels, disk."""


def run(arguments: list[str]) -> int:
    parse(Arguments, arguments, command="doctor")
    from cai_apps.doctor import SECTIONS

    for title, rows in SECTIONS.items():
        print(title)
        for name, value in rows():
            print(f"  {name:<16}{value}")
    return 0
