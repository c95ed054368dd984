"""One self-contained HTML page about a run."""

from __future__ import annotations

import html
from pathlib import Path
from string import Template

from cai_apps import metrics
from cai_apps.report.plots import CURVES, curve_svg
from cai_apps.report.timeline import timeline_svg
from cai_apps.run_directory import RunDirectory
from cai_gemini import Timeline

PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1em }
svg { width: 100%; height: auto } pre { background: #f6f6f4; padding: 1em; overflow: auto }
td, th { padding: .2em 1.2em .2em 0; text-align: left }
</style>
<h1>$title</h1>
<table>$summary</table>
<h2>Curves</h2><div class="curves">$curves</div>
$charts
<h2>Configuration</h2><pre>$config</pre>
</html>
""")


def write_report(run: RunDirectory, output: Path) -> Path:
    """Writes the page of a run; it loads nothing from anywhere else.

    Every plots/NAME.timeline.json, a saved `cai_gemini.Timeline`, is drawn.

    Raises:
        DataError: the run has no metrics yet.
    """
    records = metrics.read(run.metrics)
    charts = [f"<h2>{html.escape(file.stem)}</h2>{_inline(file)}" for file in sorted(run.plots.glob("*.svg"))]
    charts += [
        f"<h2>{html.escape(file.stem)}</h2>{timeline_svg(Timeline.load(file))}"
        for file in sorted(run.plots.glob("*.timeline.json"))
    ]
    page = PAGE.substitute(
        title=html.escape(run.path.name),
        summary="".join(f"<tr><th>{name}<td>{html.escape(value)}" for name, value in _summary(records)),
        curves="".join(curve_svg(records, curve) for curve in CURVES),
        charts="".join(charts),
        config=html.escape(run.config_file.read_text(encoding="utf-8")),
    )
    output.write_text(page, encoding="utf-8")
    return output


def _summary(records: list[dict]) -> list[tuple[str, str]]:
    first, last = records[0], records[-1]
    later = records[1:] or records  # the first step pays for warming up
    speed = sum(record["tokens_per_second"] for record in later) / len(later)
    rows = [
        ("steps", f"{last['step']:,}"),
        ("tokens", f"{last['tokens']:,}"),
        ("loss", f"{first['loss']:.4f} to {last['loss']:.4f}"),
        ("tokens per second", f"{speed:,.0f}"),
        ("peak memory of a rank", f"{max(record['memory_bytes'] for record in records) / 2**30:.2f} GiB"),
    ]
    if last["mfu"] is not None:
        shares = [sum(record[key] for record in later) / len(later) for key in ("mfu", "mfu_full_attention")]
        rows.append(("MFU, causal attention", f"{shares[0]:.1%}"))
        rows.append(("MFU, full attention", f"{shares[1]:.1%}"))
    return rows


def _inline(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    return text[text.index("<svg") :]
