"""One self-contained HTML page about a run."""

from __future__ import annotations

import html
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from cai_apps.report.facts import fact_rows, on_cpu, took, when
from cai_apps.report.inline_images import POLICY, picture
from cai_apps.report.memory import memory_html
from cai_apps.report.plots import Curve, curves_html
from cai_apps.report.probes import snapshots_html, traces_html
from cai_apps.report.texts import texts_html
from cai_apps.report.timeline import timeline_svg
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.starts import read_starts
from cai_apps.run.loop import metrics
from cai_gemini import Timeline
from cai_mesh.files import write_text

PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy"><title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.6em; margin-bottom: 0 } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ddd }
h3 { font-size: 1em } .lead { color: #666; margin-top: .2em }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: .7em; margin: 1.2em 0 }
.tiles div { background: #f4f6f6; border-radius: 6px; padding: .5em .8em }
.tiles b { display: block; font-size: 1.15em }
.tiles span { color: #666; font-size: .85em }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1em }
img:not([width]) { width: 100%; height: auto }
pre { background: #f6f6f4; padding: .5em 1em; overflow: auto; white-space: pre-wrap; margin: .3em 0 }
table { border-collapse: collapse } td, th { padding: .2em 1.2em .2em 0; text-align: left; vertical-align: top }
th { white-space: nowrap; font-weight: 600 } tr.head th { border-bottom: 1px solid #ccc }
summary { cursor: pointer; font-weight: 600 } .quiet { color: #888 }
@media print { body { margin: 0; max-width: none; font-size: 12px } h2 { break-after: avoid }
 img, .tiles, tr { break-inside: avoid } .curves { grid-template-columns: 1fr 1fr } }
</style>
<h1>$title</h1>
<p class="lead">$lead</p>
$body
</html>
""")


def _nothing(run: RunDirectory) -> str:
    return ""


@dataclass(frozen=True)
class Page:
    """What an application shows of its runs.

    Args:
        curves: curves of fields of metrics.jsonl; those without a record are left out.
        summary: rows (name, value) from the records.
        more: HTML that comes after the curves.
    """

    curves: tuple[Curve, ...]
    summary: Callable[[list[dict]], list[tuple[str, str]]]
    more: Callable[[RunDirectory], str] = _nothing


@dataclass
class Story:
    """The parts of a page, in their order; what has nothing to show is left out."""

    parts: list[str] = field(default_factory=list)

    def tell(self, title: str, content: str) -> None:
        """Add a part under a title, if there is anything in it."""
        if content:
            self.parts.append(f"<h2>{html.escape(title)}</h2>{content}")


def write_page(output: Path, *, title: str, lead: str, body: str) -> Path:
    """Writes a page that loads nothing from anywhere else; `body` is HTML, title and lead are text."""
    page = PAGE.substitute(
        policy=html.escape(POLICY), title=html.escape(title), lead=html.escape(lead), body=body
    )
    write_text(output, page)
    return output


def write_report(
    run: RunDirectory, output: Path, page_parts: Page, planned: Mapping[str, int] | None = None
) -> Path:
    """Writes the page of a run; it loads nothing from anywhere else.

    Every plots/NAME.timeline.json, a saved `cai_gemini.Timeline`, is drawn.

    Args:
        run: the directory of the run.
        output: the file to write.
        page_parts: the curves and the summary of the application.
        planned: bytes of the fullest rank by kind of tensor; None: there is no plan.

    Raises:
        DataError: the run has no metrics yet.
    """
    records, starts = metrics.read(run.metrics), read_starts(run)
    config = run.config_file.read_text(encoding="utf-8")
    lead = (lead_of(config), when(starts), took(records))
    story = Story([tiles(page_parts.summary(records))])
    for section, curves in _sections(page_parts.curves, records):
        story.tell(section, curves_html(records, curves))
    story.tell("Memory", memory_html(records, planned or {}, on_cpu=on_cpu(starts)))
    for name, chart in _charts(run):
        story.tell(name, chart)
    story.parts.append(page_parts.more(run) + texts_html(run) + traces_html(run) + snapshots_html(run))
    story.tell("How it was run", table(fact_rows(starts, records)))
    story.parts.append(folded("Configuration", f"<pre>{html.escape(config)}</pre>"))
    return write_page(
        output, title=run.path.name, lead=" · ".join(filter(None, lead)), body="\n".join(story.parts)
    )


def _sections(curves: tuple[Curve, ...], records: list[dict]) -> Iterator[tuple[str, list[Curve]]]:
    """Yield the curves that have points by section, in the order of the first of each."""
    drawn = [curve for curve in curves if curve.has_points(records)]
    for section in dict.fromkeys(curve.section for curve in drawn):
        yield section, [curve for curve in drawn if curve.section == section]


NAMES = {
    "pipeline": "A step of the pipeline",
    "offload.timeline": "A step with training state in several memories",
}
"""Titles of pictures in plots/; of others, the names of their files."""


def _charts(run: RunDirectory) -> Iterator[tuple[str, str]]:
    """Yield the pictures in plots/ with their titles."""
    for file in sorted(run.plots.glob("*.svg")):
        if file.is_file():
            yield NAMES.get(file.stem, file.stem), picture(file.read_bytes(), "svg", alt=file.stem)
    for file in sorted(run.plots.glob("*.timeline.json")):
        if file.is_file():
            yield NAMES.get(file.stem, file.stem), timeline_svg(Timeline.load(file))


def tiles(rows: list[tuple[str, str]]) -> str:
    """Rows (name, value) as tiles."""
    parts = (
        f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>" for name, value in rows
    )
    return f'<div class="tiles">{"".join(parts)}</div>'


def table(rows: list[tuple[str, str]]) -> str:
    """Rows (name, value) as a table; "" without any."""
    lines = (f"<tr><th>{html.escape(name)}<td>{html.escape(value)}" for name, value in rows)
    return f"<table>{''.join(lines)}</table>" if rows else ""


def folded(title: str, content: str) -> str:
    """HTML that is shown when its title is clicked on."""
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def lead_of(config: str) -> str:
    """One line on a run: its model, data and layout, as far as its config says."""
    try:
        values: Mapping[str, Any] = tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return ""
    parts = [_at(values, "model", "name"), _at(values, "data", "source")]
    parallel = values.get("parallel")
    if isinstance(parallel, dict):
        degrees = {
            "data": _number(parallel.get("shard")) * _number(parallel.get("replicate")),
            "context": _number(_at(parallel, "context", "size")),
            "tensor": _number(_at(parallel, "tensor", "size")),
            "pipeline": _number(_at(parallel, "pipeline", "size")),
        }
        layout = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        parts.append(f"{layout or 'one rank'}, ZeRO-{parallel.get('zero', 1)}")
    parts.append(_at(values, "precision", "compute"))
    return " · ".join(str(part) for part in parts if part)


def _at(values: Mapping[str, Any], section: str, key: str) -> Any:
    inner = values.get(section)
    return inner.get(key) if isinstance(inner, dict) else None


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 1
