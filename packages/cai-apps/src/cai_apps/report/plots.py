"""Curves of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cai_apps.report.inline_images import svg_of
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.loop import metrics
from cai_mesh.files import replaced

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Curve:
    """Fields of metrics.jsonl that share one plot."""

    title: str
    fields: tuple[str, ...]


LOSS = Curve("loss", ("loss", "validation_loss"))


def draw(records: list[dict], curve: Curve) -> Figure:
    """A figure of a curve over the steps; steps that lack a field are passed over."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=curve.title)
    for field in curve.fields:
        points = [(record["step"], record[field]) for record in records if field in record]
        if points:
            axes.plot(*zip(*points, strict=True), "-" if len(points) == len(records) else "o-", label=field)
    if len(axes.lines) > 1:
        axes.legend()
    axes.grid(alpha=0.3)
    return figure


def curve_svg(records: list[dict], curve: Curve) -> str:
    """The picture of a curve, as HTML."""
    return svg_of(draw(records, curve), alt=curve.title)


def draw_loss(run: RunDirectory) -> Path:
    """Draws training and validation loss to plots/loss.png."""
    path = run.plots / "loss.png"
    with replaced(path) as file:
        draw(metrics.read(run.metrics), LOSS).savefig(file, dpi=120, format="png")
    return path
