"""The picture of an offloaded step shows its memory, its budget and its lanes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cai_apps.report import page
from cai_apps.report.timeline import draw_timeline
from cai_apps.run.files.directory import RunDirectory
from cai_gemini import Timeline

GB = 10**9
LANES = {
    "compute": [(0.0, 1.0, "layers.0.weight"), (1.0, 3.0, "layers.1.weight")],
    "to_device": [(0.0, 0.9, "layers.1.weight")],
    "to_host": [],
    "host": [(3.0, 4.0, "layers.0.weight")],
}
TIMELINE = Timeline(8 * GB, [0.0, 1.0, 2.0], {"weights": [GB, 3 * GB, 2 * GB], "state": [2 * GB] * 3}, LANES)


def test_memory_is_stacked_under_the_budget_and_lanes_lie_below():
    above, below = draw_timeline(TIMELINE).axes
    assert [text.get_text() for text in above.get_legend().get_texts()] == [
        "weights",
        "state",
        "budget, 8 GB",
    ]
    assert list(above.lines[0].get_ydata()) == [8.0, 8.0]
    tops = [max(path.vertices[:, 1].max() for path in area.get_paths()) for area in above.collections]
    assert tops == pytest.approx([3.0, 5.0])
    assert [len(lane.get_paths()) for lane in below.collections] == [2, 1, 0, 1]
    ends = [path.vertices[:, 0].max() for lane in below.collections for path in lane.get_paths()]
    assert ends == pytest.approx([1.0, 3.0, 0.9, 4.0])
    assert [label.get_text() for label in below.get_yticklabels()] == [
        "compute, 75%",
        "to device, 22%",
        "to host: nothing",
        "host step, 25%",
    ]
    assert "layers.1" in [text.get_text() for text in below.texts]


def test_a_simulated_step_has_lanes_only():
    assert len(draw_timeline(Timeline(lanes=LANES)).axes) == 1


def test_the_report_draws_what_is_in_plots(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    run.plots.mkdir()
    run.config_file.write_text("")
    TIMELINE.save(run.plots / "step.timeline.json")
    monkeypatch.setattr(page, "metrics", SimpleNamespace(read=lambda _: []))
    shown = page.Page((), lambda _: [])
    text = page.write_report(run, tmp_path / "report.html", shown).read_text()
    assert "<h2>step.timeline</h2><img" in text and "A step with" not in text
