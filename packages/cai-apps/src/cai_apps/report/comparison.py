"""One page about several runs: their curves together, what came out, and how their configs differ."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cai_apps.config import file as config_file
from cai_apps.report.facts import fact_rows
from cai_apps.report.inline_images import svg_of
from cai_apps.report.page import Page, Story, write_page
from cai_apps.report.plots import draw_runs
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.starts import read_starts
from cai_apps.run.loop import metrics

LEFT_OUT = ("log.directory",)
"""Keys that differ between any two runs."""
SAME = "nothing: the configs are the same"


def write_comparison(runs: Sequence[RunDirectory], output: Path, page_parts: Page) -> Path:
    """Writes one page about runs of one application.

    Args:
        runs: their directories.
        output: the file to write.
        page_parts: the curves and the summary of the application.

    Raises:
        DataError: a run has no metrics yet.
    """
    names = names_of(runs)
    records = {name: metrics.read(run.metrics) for name, run in zip(names, runs, strict=True)}
    starts = {name: read_starts(run) for name, run in zip(names, runs, strict=True)}
    configs = {
        name: dict(_flat(config_file.parse(run.config_file))) for name, run in zip(names, runs, strict=True)
    }
    story = Story()
    story.tell("What came out", compared({name: page_parts.summary(rows) for name, rows in records.items()}))
    story.tell("How the configs differ", differences(configs))
    drawn = [curve for curve in page_parts.curves if any(curve.has_points(rows) for rows in records.values())]
    pictures = [svg_of(draw_runs(records, curve), alt=curve.title) for curve in drawn]
    if pictures:
        story.tell("Curves", f'<div class="curves">{"".join(pictures)}</div>')
    story.tell(
        "How they were run", compared({name: fact_rows(starts[name], records[name]) for name in names})
    )
    title = " and ".join(names) if len(names) < 4 else f"{len(names)} runs"
    return write_page(output, title=title, lead=f"{len(names)} runs compared", body="\n".join(story.parts))


def names_of(runs: Sequence[RunDirectory]) -> list[str]:
    """Return a name for each run that no other has: that of its directory, with those around it where it must be."""
    for length in range(1, max(len(run.path.parts) for run in runs)):
        names = [str(Path(*run.path.parts[-length:])) for run in runs]
        if len({*names}) == len(names):
            return names
    return [f"{run.path} ({number})" for number, run in enumerate(runs, 1)]


def compared(rows_by_run: Mapping[str, list[tuple[str, str]]]) -> str:
    """A table with a column for each run and a row for each name."""
    names = dict.fromkeys(name for rows in rows_by_run.values() for name, _ in rows)
    by_run = [dict(rows) for rows in rows_by_run.values()]
    return _table([*rows_by_run], {name: [rows.get(name, "") for rows in by_run] for name in names})


def differences(configs: Mapping[str, Mapping[str, str]]) -> str:
    """A table of the keys that have another value in some run, with a column for each."""
    keys = sorted({key for config in configs.values() for key in config} - {*LEFT_OUT})
    rows = {key: [config.get(key, "not set") for config in configs.values()] for key in keys}
    rows = {key: values for key, values in rows.items() if len({*values}) > 1}
    return _table([*configs], rows) if rows else f"<p>{SAME}</p>"


def _table(heads: list[str], rows: Mapping[str, list[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}" for name in ("", *heads))
    lines = (
        f"<tr><th>{html.escape(name)}{''.join(f'<td>{html.escape(value)}' for value in values)}"
        for name, values in rows.items()
    )
    return f'<table><tr class="head">{head}{"".join(lines)}</table>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys of a table of tables with their values as text."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
