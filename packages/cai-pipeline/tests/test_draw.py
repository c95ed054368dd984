from __future__ import annotations

import json
from xml.etree import ElementTree

from cai_pipeline import draw
from cai_pipeline.plans.placement import place
from cai_pipeline.plans.schedules import program
from cai_pipeline.plans.simulation import simulate


def test_the_picture_has_a_box_per_action() -> None:
    picture = ElementTree.fromstring(draw.svg(simulate(program("1f1b", place(4), 8))))
    titles = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 4 * 8 * 2
    assert "3B7 " in "".join(f"{title} " for title in titles if title)


def test_the_boxes_stay_inside() -> None:
    picture = ElementTree.fromstring(draw.svg(simulate(program("gpipe", place(3), 5)), width=400))
    for box in picture.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= 400.01


def test_two_timelines_share_one_scale_and_a_legend() -> None:
    ran, predicted = simulate(program("zb-h1", place(2), 3)), simulate(program("1f1b", place(2), 3))
    picture = ElementTree.fromstring(draw.svg({"as it ran": ran, "as predicted": predicted}, unit="s"))
    texts = [text.text or "" for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:4] == ["forward", "backward", "weight gradients", "idle"]
    assert [text for text in texts if text.startswith("as ")] == [
        "as it ran: 2 ranks, time 10 s, bubble 10.0%",
        "as predicted: 2 ranks, time 12 s, bubble 25.0%",
    ]
    assert texts.count("rank 1") == 2 and texts.count("10 s") == 2  # a mark on either axis, of the longer one
    ends = [
        float(b.get("x", 0)) + float(b.get("width", 0))
        for b in picture.iter()
        if b.find("{*}title") is not None
    ]
    assert max(ends[:18]) / max(ends[18:]) < 0.95


def test_the_axis_has_round_marks() -> None:
    texts = ElementTree.fromstring(draw.svg(simulate(program("gpipe", place(3), 5)))).itertext()
    assert {"0", "5", "10", "15", "20"} <= {*texts}


def test_the_terminal_form_in_full() -> None:
    assert draw.text(simulate(program("1f1b", place(2), 2)), width=60) == (
        "2 ranks, time 9, bubble 33.3%\n  0  01..aa.bb\n  1  .0aa1bb.."
    )


def test_long_steps_fit_the_width() -> None:
    lines = draw.text(simulate(program("1f1b", place(8), 200)), width=80).splitlines()
    assert max(map(len, lines)) <= 80


def test_weight_gradients_are_capitals() -> None:
    assert draw.text(simulate(program("zb-h1", place(2), 3)), width=15).splitlines()[1:] == [
        "  0  01.aA2bBcC",
        "  1  .0a1bA2cBC",
    ]


def test_a_trace_has_an_event_per_action_and_names() -> None:
    timeline = simulate(program("1f1b", place(3), 4))
    events = json.loads(draw.trace({"ran": timeline, "simulated": timeline}))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * 3 * 4 * 2
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "ran", "simulated", "rank 0", "rank 1", "rank 2"
    }  # fmt: skip
    assert max(event["ts"] + event["dur"] for event in spans) == timeline.makespan * 1e6
