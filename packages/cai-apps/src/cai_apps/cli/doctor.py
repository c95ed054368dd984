"""cai doctor [--nvme DIRECTORY] [--json]"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cai_apps.config.arguments import parse
from cai_apps.config.terminal import printable, terminal
from cai_apps.run.exit_codes import FAILURE
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from cai_apps.report.machine import Facts

SIGNS = {"green": "ok", "yellow": "!", "red": "X", None: ""}
"""Signs before what is marked, which say the same without colours."""


@dataclass(frozen=True)
class Arguments:
    """Show what this machine offers: versions, devices, backends, memory, links, kernels, disk. What is green is good,
    what is yellow works slowly or not for everything, what is red has to be mended; at the end stands what to do. The
    exit code is 1 where something is red."""

    nvme: Path | None = None
    """A directory to test as memory.nvme: 256 MB are written and read."""
    json: bool = False
    """Print one JSON object: for each section its facts, with "name", "value", "mark" and "advice"."""


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
    facts_by_section: dict[str, Facts] = {}
    for title, look in sections.items():
        facts_by_section[title] = look()
        if not options.json:
            _show(title, facts_by_section[title])
    if options.json:
        facts = {title: [asdict(fact) for fact in facts] for title, facts in facts_by_section.items()}
        print(json.dumps(facts))
    else:
        print(*verdict(facts_by_section), sep="\n")
    return FAILURE if any(fact.mark == "red" for facts in facts_by_section.values() for fact in facts) else 0


def _show(title: str, facts: Facts) -> None:
    """Print a section; marks are in colour where the terminal has some."""
    from rich.console import Console
    from rich.text import Text

    print(title)
    console = Console(file=terminal(), highlight=False, soft_wrap=True)
    for fact in facts:
        sign = Text(f"  {SIGNS[fact.mark]:<3}", style=fact.mark or "")
        console.print(sign, Text(printable(f"{fact.name:<15} {fact.value}")), sep="")


def verdict(facts_by_section: Mapping[str, Facts]) -> Iterator[str]:
    """Yield the last lines: how many facts have each mark, and what to do about those that are red or yellow."""
    marked = [(title, fact) for title, facts in facts_by_section.items() for fact in facts if fact.mark]
    counts = Counter(fact.mark for _, fact in marked)
    yield ", ".join(f"{counts[mark]} {mark}" for mark in ("green", "yellow", "red"))
    for mark in ("red", "yellow"):
        for title, fact in marked:
            if fact.mark == mark:
                yield f"  {mark}: {title}, {fact.name}: {fact.advice}"
