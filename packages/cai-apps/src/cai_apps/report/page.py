"""One self-contained HTML page about a run."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import Template

from cai_apps.report.inline_images import POLICY, picture
from cai_apps.report.plots import Curve, curve_svg
from cai_apps.report.probes import snapshots_html, traces_html
from cai_apps.report.texts import texts_html
from cai_apps.report.timeline import timeline_svg
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.loop import metrics
from cai_gemini import Timeline
from cai_mesh.files import write_text

PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy"><title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1em }
img:not([width]) { width: 100%; height: auto } pre { background: #f6f6f4; padding: 1em; overflow: auto }
td, th { padding: .2em 1.2em .2em 0; text-align: left }
</style>
<h1>$title</h1>
<table>$summary</table>
$more
<h2>Curves</h2><div class="curves">$curves</div>
$charts
<h2>Configuration</h2><pre>$config</pre>
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
        more: HTML that comes before the curves.
    """

    curves: tuple[Curve, ...]
    summary: Callable[[list[dict]], list[tuple[str, str]]]
    more: Callable[[RunDirectory], str] = _nothing


def write_report(run: RunDirectory, output: Path, page_parts: Page) -> Path:
    """Writes the page of a run; it loads nothing from anywhere else.

    Every plots/NAME.timeline.json, a saved `cai_gemini.Timeline`, is drawn.

    Raises:
        DataError: the run has no metrics yet.
    """
    records = metrics.read(run.metrics)
    charts = [
        f"<h2>{html.escape(file.stem)}</h2>{picture(file.read_bytes(), 'svg')}"
        for file in sorted(run.plots.glob("*.svg"))
        if file.is_file()
    ]
    charts += [
        f"<h2>{html.escape(file.stem)}</h2>{timeline_svg(Timeline.load(file))}"
        for file in sorted(run.plots.glob("*.timeline.json"))
        if file.is_file()
    ]
    page = PAGE.substitute(
        policy=html.escape(POLICY),
        title=html.escape(run.path.name),
        summary="".join(
            f"<tr><th>{html.escape(name)}<td>{html.escape(value)}"
            for name, value in page_parts.summary(records)
        ),
        curves="".join(
            curve_svg(records, curve)
            for curve in page_parts.curves
            if any(field in record for record in records for field in curve.fields)
        ),
        more=page_parts.more(run) + texts_html(run),
        charts="".join(charts) + traces_html(run) + snapshots_html(run),
        config=html.escape(run.config_file.read_text(encoding="utf-8")),
    )
    write_text(output, page)
    return output
