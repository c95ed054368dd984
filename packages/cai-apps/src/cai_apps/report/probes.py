"""Traces and snapshots of memory of a run, as tables of the page."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.probes.memory import FOLDER as SNAPSHOTS
from cai_apps.run.probes.operators import FOLDER as TRACES
from cai_apps.run.probes.operators import TABLE
from cai_mesh.errors import DataError

HEAD = {"operator": "operator", "calls": "calls", "host_ms": "host, ms", "device_ms": "device, ms"}
SITES = {"bytes": "MiB", "count": "blocks", "place": "line", "code": "", "caller": "called from"}


def traces_html(run: RunDirectory) -> str:
    """The traces of a run's steps, each with its longest operators; "" where there are none."""
    parts = []
    for file in sorted((run.path / TRACES).glob(f"*{TABLE}"), key=_numbers):
        trace = file.name.replace(TABLE, ".json.gz")
        parts.append(
            f"<h3>{html.escape(trace)}</h3>"
            f"<p>{TRACES}/{html.escape(trace)} opens in ui.perfetto.dev and chrome://tracing; times are those of "
            f"operators by themselves.</p>{_table(HEAD, _rows(_read(file)))}"
        )
    return f"<h2>Traces</h2>{''.join(parts)}" if parts else ""


def snapshots_html(run: RunDirectory) -> str:
    """Which step and rank each snapshot of memory is of, and what was largest in it; "" where there are none."""
    parts = []
    for file in sorted((run.path / SNAPSHOTS).glob("*.json"), key=_numbers):
        fields = _read(file)
        if not isinstance(fields, dict):
            raise _broken(file)
        parts.append(
            f"<h3>rank {_text(fields, 'rank')}, step {_text(fields, 'step')}</h3>{_about(fields, file)}"
        )
    return f"<h2>Memory</h2>{''.join(parts)}" if parts else ""


def _numbers(file: Path) -> list[int]:
    """Return the rank and the steps in a file's name."""
    return [int(number) for number in re.findall(r"\d+", file.name)]


def _about(fields: dict[str, Any], file: Path) -> str:
    if "message" in fields:
        return f"<p>{_text(fields, 'message')}</p>"
    request = (
        f" {_size(fields.get('asked_bytes'))} were asked for with {_size(fields.get('free_bytes'))} free."
        if "asked_bytes" in fields
        else ""
    )
    pickle = html.escape(file.with_suffix(".pickle").name)
    return (
        f"<p>{_text(fields, 'device')}, {_text(fields, 'reason')}: {_size(fields.get('allocated_bytes'))} allocated, "
        f"{_size(fields.get('reserved_bytes'))} reserved at the end.{request} {SNAPSHOTS}/{pickle} opens in "
        f"pytorch.org/memory_viz.</p>{_table(SITES, _rows(fields.get('sites')))}"
    )


def _table(head: dict[str, str], rows: list[dict[str, Any]]) -> str:
    names = "".join(f"<th>{html.escape(name)}" for name in head.values())
    lines = "".join(f"<tr>{''.join(f'<td>{_cell(row.get(key), key)}' for key in head)}" for row in rows)
    return f"<table><tr>{names}{lines}</table>"


def _cell(value: Any, key: str) -> str:
    if isinstance(value, int | float) and key == "bytes":
        return f"{value / 2**20:,.1f}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"<code>{html.escape(str(value))}</code>" if key == "code" and value else html.escape(str(value))


def _size(value: Any) -> str:
    return f"{value / 2**30:,.2f} GiB" if isinstance(value, int | float) else "unknown bytes"


def _text(fields: dict[str, Any], key: str) -> str:
    return html.escape(str(fields.get(key, "unknown")))


def _rows(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise _broken(file) from None


def _broken(file: Path) -> DataError:
    return DataError(f"{file} is broken", expected="what a run has written", fix="take the file away")
