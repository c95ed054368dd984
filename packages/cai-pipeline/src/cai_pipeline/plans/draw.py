"""Draw a timeline: `svg` for a page, `text` for a terminal, `trace` for a trace viewer.

All return strings; no plotting library is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape

from cai_pipeline.plans.actions import Kind
from cai_pipeline.plans.simulation import Span, Timeline

_FILL = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f58518",
    Kind.BACKWARD_INPUT: "#f58518",
    Kind.BACKWARD_WEIGHT: "#54a24b",
}
_IDLE = "#e6e6e6"
_LANE, _GAP, _LEFT, _RIGHT, _TOP, _HEAD, _AXIS = 28, 4, 64, 72, 30, 22, 34
"""Pixels: height of a lane and the gap below it, what is left and right of the lanes, above all, above the lanes of a
timeline, and below them."""
_MANY = 16
"""Ranks above which lanes are half as high."""
_LEGEND = (
    ("forward", Kind.FORWARD),
    ("backward", Kind.BACKWARD),
    ("weight gradients", Kind.BACKWARD_WEIGHT),
)
_TICKS = 10
"""Marks of an axis at most."""


def svg(timelines: Timeline | Mapping[str, Timeline], *, width: int = 960, unit: str = "") -> str:
    """A chart with one lane per rank, a legend, an axis of time and each rank's idle share, as an SVG document.

    Args:
        timelines: the result of `simulate`, or several by name, such as a step as it ran and as it was predicted; they
            are drawn one above the other on one scale.
        width: width of the picture in pixels.
        unit: the unit of the times; empty: that of the durations they were simulated with.
    """
    named = {"": timelines} if isinstance(timelines, Timeline) else timelines
    longest = max((timeline.makespan for timeline in named.values()), default=0.0) or 1.0
    scale = (width - _LEFT - _RIGHT) / longest
    parts, top = [_legend(named)], _TOP
    for name, timeline in named.items():
        parts += _chart(timeline, name, top, scale, longest, width, unit)
        top += _HEAD + timeline.ranks * (_lane(timeline) + _GAP) + _AXIS
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}" '
        f'font-family="sans-serif" font-size="11"><rect width="{width}" height="{top}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _lane(timeline: Timeline) -> int:
    """Return the height of a lane."""
    return _LANE if timeline.ranks <= _MANY else _LANE // 2


def _legend(named: Mapping[str, Timeline]) -> str:
    """Return a colour and a word for each kind of action that is drawn, and for idle time."""
    kinds = {_FILL[span.action.kind] for timeline in named.values() for span in timeline.spans}
    entries = [(word, _FILL[kind]) for word, kind in _LEGEND if _FILL[kind] in kinds] + [("idle", _IDLE)]
    boxes = [
        f'<rect x="{_LEFT + 120 * place}" y="8" width="12" height="12" fill="{fill}"/>'
        f'<text x="{_LEFT + 120 * place + 17}" y="18">{word}</text>'
        for place, (word, fill) in enumerate(entries)
    ]
    return "".join(boxes)


def _chart(
    timeline: Timeline, name: str, top: int, scale: float, longest: float, width: int, unit: str
) -> list[str]:
    """Return the lanes of a timeline with its caption above and its axis below."""
    lane, end = _lane(timeline), width - _RIGHT
    caption = ": ".join(filter(None, (name, _caption(timeline, unit))))
    parts = [f'<text x="8" y="{top + 14}" font-weight="bold">{escape(caption)}</text>']
    for rank in range(timeline.ranks):
        y = top + _HEAD + rank * (lane + _GAP)
        text_y = y + lane / 2 + 4
        parts += [
            f'<text x="8" y="{text_y:g}">rank {rank}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{end - _LEFT}" height="{lane}" fill="{_IDLE}"/>',
            f'<text x="{end + 6}" y="{text_y:g}" fill="#666666">{_idle(timeline, rank):.0%} idle</text>',
        ]
    parts += [_box(span, scale, top + _HEAD, lane) for span in timeline.spans]
    axis = top + _HEAD + timeline.ranks * (lane + _GAP)
    parts.append(f'<line x1="{_LEFT}" x2="{end}" y1="{axis}" y2="{axis}" stroke="#666666"/>')
    for tick in _ticks(longest):
        x = _LEFT + tick * scale
        parts.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{axis}" y2="{axis + 4}" stroke="#666666"/>'
            f'<text x="{x:.2f}" y="{axis + 16}" text-anchor="middle" fill="#666666">{_time(tick, unit)}</text>'
        )
    return parts


def _idle(timeline: Timeline, rank: int) -> float:
    """Return the share of a step in which a rank computes nothing."""
    busy = sum(span.end - span.start for span in timeline.spans if span.rank == rank)
    return 1.0 - busy / timeline.makespan if timeline.makespan else 0.0


def _ticks(longest: float) -> list[float]:
    """Return round times from 0 to the longest, `_TICKS` at most."""
    power = 10.0 ** math.floor(math.log10(longest / _TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if longest / (power * factor) <= _TICKS)
    return [number * step for number in range(int(longest / step * (1 + 1e-9)) + 1)]


def _time(value: float, unit: str) -> str:
    """Return a time in words; seconds below ten in milliseconds."""
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.4g} ms"
    return f"{value:.4g}{unit and ' '}{unit}"


def _box(span: Span, scale: float, top: int, lane: int) -> str:
    x, w = _LEFT + span.start * scale, (span.end - span.start) * scale
    y = top + span.rank * (lane + _GAP)
    label = str(span.action)
    box = (
        f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{lane}" fill="{_FILL[span.action.kind]}" '
        f'stroke="white"><title>{label} {span.start:g} to {span.end:g}</title></rect>'
    )
    if w < 7 * len(label) or lane < _LANE:
        return box
    middle = f'x="{x + w / 2:.2f}" y="{y + lane / 2 + 4:g}"'
    return f'{box}<text {middle} text-anchor="middle" fill="white">{label}</text>'


def text(timeline: Timeline, *, width: int = 100) -> str:
    """The chart as one line per rank, at most `width` characters each.

    A forward is drawn as its microbatch's last digit, a backward as a letter (a for microbatch 0), the part of one that
    makes weight gradients as a capital letter, idle time as a dot.
    Time is rounded to columns, so a very short action may not be drawn.
    """
    columns = max(width - 5, 1)
    scale = columns / timeline.makespan if timeline.makespan else 1.0
    shortest = min((s.end - s.start for s in timeline.spans if s.end > s.start), default=1.0)
    scale = min(scale, 1.0 / shortest)
    lanes = [["."] * round(timeline.makespan * scale) for _ in range(timeline.ranks)]
    for span in timeline.spans:
        m = span.action.microbatch or 0
        first = "A" if span.action.kind is Kind.BACKWARD_WEIGHT else "a"
        mark = str(m % 10) if span.action.kind is Kind.FORWARD else chr(ord(first) + m % 26)
        for column in range(round(span.start * scale), round(span.end * scale)):
            lanes[span.rank][column] = mark
    lines = [f"{rank:>3}  {''.join(lane)}" for rank, lane in enumerate(lanes)]
    return "\n".join([_caption(timeline), *lines])


def trace(timelines: Mapping[str, Timeline]) -> str:
    """Timelines in seconds as a file that Perfetto and chrome://tracing open: a process each, a row for each rank.

    The form is Chrome's Trace Event Format, times in microseconds.
    """
    events: list[dict] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in range(timeline.ranks)
        ]
        events += [
            {
                "ph": "X",
                "name": str(span.action),
                "cat": span.action.kind.name,
                "pid": process,
                "tid": span.rank,
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
            for span in timeline.spans
        ]
    return json.dumps({"traceEvents": events})


def _caption(timeline: Timeline, unit: str = "") -> str:
    return f"{timeline.ranks} ranks, time {_time(timeline.makespan, unit)}, bubble {timeline.bubble:.1%}"
