"""The memory of an offloaded step over time, and what the link and the host did beside compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_apps.report.inline_images import svg_of
from cai_gemini import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = {"compute": "compute", "to_device": "to device", "to_host": "to host", "host": "host step"}
DISK = {"disk": "disk"}  # a row where there is something in it
NARROW = 0.04  # of the whole: a span below carries no name
THIN = 0.001
"""Part of the whole that a span is drawn as at least, so that it can be seen."""
MANY = 24  # spans in a lane, above which none carries one


def draw_timeline(timeline: Timeline) -> Figure:
    """Device memory stacked by kind under the budget's line, above lanes of spans.

    A simulated step has lanes only.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5 if timeline.memory else 2.6), layout="constrained")
    if not timeline.memory:
        _draw_lanes(figure.add_subplot(), timeline)
        return figure
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_memory(above, timeline)
    _draw_lanes(below, timeline)
    return figure


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    times = [*timeline.times, max(timeline.end, timeline.times[-1])]
    kinds = {kind: [*values, values[-1]] for kind, values in timeline.memory.items()}
    fullest = max(map(sum, zip(*kinds.values(), strict=True)))
    unit, name = (1e9, "GB") if max(fullest, timeline.budget or 0) >= 1e8 else (1e6, "MB")
    sizes = [[nbytes / unit for nbytes in values] for values in kinds.values()]
    axes.stackplot(times, *sizes, labels=list(kinds), step="post", alpha=0.8)
    if timeline.budget is not None:
        label = f"budget, {timeline.budget / unit:.3g} {name}"
        axes.axhline(timeline.budget / unit, color="black", linestyle="--", label=label)
    axes.set_ylabel(f"device memory ({name})")
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=len(kinds) + 1, fontsize="small", frameon=False
    )


def _draw_lanes(axes: Axes, timeline: Timeline) -> None:
    rows = ROWS | (DISK if timeline.lanes.get("disk") else {})
    for row, lane in enumerate(rows):
        spans = timeline.lanes.get(lane, [])
        bars = [(begin, max(end - begin, THIN * timeline.end)) for begin, end, _ in spans]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=f"C{row}", edgecolor="white", linewidth=0.3)
        for begin, end, name in spans:
            if len(spans) <= MANY and end - begin > NARROW * timeline.end:
                short = name.removesuffix(".weight")
                axes.text((begin + end) / 2, row, short, ha="center", va="center", fontsize=6, clip_on=True)
    labels = [_label(name, timeline.lanes.get(lane, []), timeline.end) for lane, name in rows.items()]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("seconds")


def _label(name: str, spans: list[tuple[float, float, str]], total: float) -> str:
    """Return the name of a lane with the share of the step in which something happens there."""
    busy, end = 0.0, 0.0
    for begin, stop, _ in sorted(spans):
        busy += max(stop - max(begin, end), 0.0)
        end = max(end, stop)
    return f"{name}, {busy / total:.0%}" if spans and total else f"{name}: nothing"


def timeline_svg(timeline: Timeline) -> str:
    """The picture of `draw_timeline`, as HTML."""
    return svg_of(draw_timeline(timeline))
