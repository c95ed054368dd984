"""Memory of a run over its steps: what was measured, above what was planned for each kind of tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cai_apps.report.inline_images import svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30
STATE = (("device_bytes", "training state on the device"), ("host_bytes", "training state on the host"))
"""What an offloaded run records in each step."""


def memory_html(records: list[dict], planned: Mapping[str, int], *, on_cpu: bool) -> str:
    """The picture with a line on how to read it; "" where nothing was measured.

    Args:
        records: the records of the steps.
        planned: bytes of the fullest rank, by kind of tensor; empty: there is no plan.
        on_cpu: whether the ranks ran on a CPU, where the whole process is measured.
    """
    peaks = [
        (record["step"], record["memory_bytes"])
        for record in records
        if _is_number(record.get("memory_bytes"))
    ]
    if not peaks:
        return ""
    texts = ["The line is the peak of the rank that holds most."]
    if on_cpu:
        texts.append("On a CPU it is all memory of that rank's process, Python and the libraries with it.")
    if planned:
        texts.append("The areas are what the plan expects at the fullest moment.")
    return f"<p>{' '.join(texts)}</p>{svg_of(draw(records, planned), alt='memory')}"


def draw(records: list[dict], planned: Mapping[str, int]) -> Figure:
    """A figure of the measured peak over the steps, and of planned bytes by kind as areas."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="memory of a rank (GiB)")
    steps = [record["step"] for record in records if _is_number(record.get("memory_bytes"))]
    peaks = [record["memory_bytes"] / GIB for record in records if _is_number(record.get("memory_bytes"))]
    kinds = {kind: nbytes for kind, nbytes in planned.items() if nbytes}
    if kinds:
        ends = [steps[0], max(steps[-1], steps[0] + 1)]
        areas = [[nbytes / GIB] * 2 for nbytes in kinds.values()]
        axes.stackplot(ends, *areas, labels=[_with_size(*kind) for kind in kinds.items()], alpha=0.6)
    axes.plot(
        steps, peaks, "o-" if len(steps) < 3 else "-", color="black", label=f"measured, {max(peaks):.2f} GiB"
    )
    _draw_state(axes, records)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)
    return figure


def _draw_state(axes: Axes, records: list[dict]) -> None:
    """Draw what an offloaded run holds in either memory between uses."""
    for field, name in STATE:
        points = [
            (record["step"], record[field] / GIB) for record in records if _is_number(record.get(field))
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "--", label=name)


def _with_size(kind: str, nbytes: int) -> str:
    return f"{kind}, {nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{kind}, {nbytes / 2**20:.1f} MiB"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
