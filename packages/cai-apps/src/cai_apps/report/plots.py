"""Curves of a run, and of several runs in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cai_apps.report.inline_images import svg_of
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.loop import metrics
from cai_mesh.files import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED = 20
"""Points of a curve above which it is smoothed; a smoothed value remembers about a `SMOOTHED`th of the run."""
MANY = 60
"""Points of a curve above which they are joined without a mark at each."""
SIZE, WIDE = (7, 3.6), (11, 3.6)
"""Inches of a picture beside another one, and of one alone."""


@dataclass(frozen=True)
class Curve:
    """Fields of metrics.jsonl that share one plot.

    Args:
        title: the name of its axis.
        fields: the fields; those that a record lacks are passed over.
        section: the part of the page that it stands in.
        smooth: whether the line is smoothed, with the values as they are in pale behind it.
    """

    title: str
    fields: tuple[str, ...]
    section: str = "More curves"
    smooth: bool = True

    def has_points(self, records: list[dict]) -> bool:
        """Whether there is anything to draw."""
        return any(_points(records, field) for field in self.fields)


LOSS = Curve("loss", ("loss", "validation_loss"), "Loss")
WORDS = {"loss": "training", "validation_loss": "validation"}
"""Names of fields in a legend; of others, their own with spaces."""


def draw(records: list[dict], curve: Curve, *, alone: bool = False) -> Figure:
    """A figure of a curve over the steps; steps that lack a field are passed over.

    Args:
        records: the records of the steps.
        curve: the curve.
        alone: whether no other picture stands beside it.
    """
    figure, axes = _figure(curve, WIDE if alone else SIZE)
    for field in curve.fields:
        if points := _points(records, field):
            _line(axes, points, WORDS.get(field, field.replace("_", " ")), smooth=curve.smooth)
    _finish(axes)
    return figure


def draw_runs(records_by_run: Mapping[str, list[dict]], curve: Curve) -> Figure:
    """A figure of the first field of a curve, a line for each run by its name."""
    figure, axes = _figure(curve, SIZE)
    for name, records in records_by_run.items():
        if points := _points(records, curve.fields[0]):
            _line(axes, points, _plain(name), smooth=curve.smooth)
    _finish(axes)
    return figure


def _plain(name: str) -> str:
    """Return a name as matplotlib shows it letter for letter; a legend leaves out what begins with an underscore."""
    return f" {name}".replace("$", r"\$")


def _figure(curve: Curve, size: tuple[float, float]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.add_subplot(xlabel="step", ylabel=_plain(curve.title).strip())


def _points(records: list[dict], field: str) -> list[tuple[int, float]]:
    """Return the steps that have a number of this name, and the numbers."""
    numbers = ((record["step"], record.get(field)) for record in records)
    return [(step, value) for step, value in numbers if isinstance(value, int | float)]


def _line(axes: Axes, points: list[tuple[int, float]], name: str, *, smooth: bool) -> None:
    steps, values = zip(*points, strict=True)
    if not smooth or len(points) <= SMOOTHED:
        axes.plot(steps, values, "o-" if len(points) <= MANY else "-", markersize=3, label=name)
        return
    (line,) = axes.plot(steps, smoothed(list(values)), label=f"{name}, smoothed", linewidth=1.8)
    axes.plot(steps, values, color=line.get_color(), alpha=0.3, linewidth=0.8, zorder=1)


def smoothed(values: list[float]) -> list[float]:
    """Means of the values so far, recent ones weighed most: an exponential average without a bias to its start."""
    decay = 1 - SMOOTHED / max(len(values), SMOOTHED + 1)
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        means.append(total / weight)
    return means


def _finish(axes: Axes) -> None:
    if any(not str(line.get_label()).startswith("_") for line in axes.lines) and len(axes.lines) > 1:
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def curves_html(records: list[dict], curves: Sequence[Curve]) -> str:
    """The pictures of some curves side by side, as HTML."""
    pictures = [svg_of(draw(records, curve, alone=len(curves) == 1), alt=curve.title) for curve in curves]
    return f'<div class="curves">{"".join(pictures)}</div>'


def draw_loss(run: RunDirectory) -> Path:
    """Draws training and validation loss to plots/loss.png."""
    path = run.plots / "loss.png"
    with replaced(path) as file:
        draw(metrics.read(run.metrics), LOSS).savefig(file, dpi=120, format="png")
    return path
