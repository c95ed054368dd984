"""Draw a timeline: `svg` for a page, `text` for a terminal, `trace` for a trace viewer.

All return strings; no plotting library is needed.
"""

from __future__ import annotations

import json
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
_LANE, _GAP, _LEFT, _TOP = 28, 4, 64, 24


def svg(timeline: Timeline, *, width: int = 960) -> str:
    """A chart with one lane per rank, as an SVG document.

    Args:
        timeline: the result of `simulate`.
        width: width of the picture in pixels.
    """
    scale = (width - _LEFT - 8) / (timeline.makespan or 1.0)
    height = _TOP + timeline.ranks * (_LANE + _GAP) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="16">{escape(_caption(timeline))}</text>',
    ]
    for rank in range(timeline.ranks):
        y = _TOP + rank * (_LANE + _GAP)
        parts.append(f'<text x="8" y="{y + _LANE / 2 + 4:g}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{width - _LEFT - 8}" height="{_LANE}" fill="#eeeeee"/>'
        )
    parts += [_box(span, scale) for span in timeline.spans]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(span: Span, scale: float) -> str:
    x, w = _LEFT + span.start * scale, (span.end - span.start) * scale
    y = _TOP + span.rank * (_LANE + _GAP)
    label = str(span.action)
    box = (
        f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{_LANE}" fill="{_FILL[span.action.kind]}" '
        f'stroke="white"><title>{label} {span.start:g} to {span.end:g}</title></rect>'
    )
    if w < 7 * len(label):
        return box
    middle = f'x="{x + w / 2:.2f}" y="{y + _LANE / 2 + 4:g}"'
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


def _caption(timeline: Timeline) -> str:
    return f"{timeline.ranks} ranks, time {timeline.makespan:g}, bubble {timeline.bubble:.1%}"
