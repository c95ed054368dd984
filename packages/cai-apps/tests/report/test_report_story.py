"""The page of a run tells when, where and how; of several runs, one page compares them."""

from __future__ import annotations

import json
import re

import pytest

from cai_apps.cli import main
from cai_apps.report.comparison import SAME, differences, names_of
from cai_apps.report.facts import duration, fact_rows
from cai_apps.report.memory import draw as draw_memory
from cai_apps.report.plots import Curve, draw, draw_runs, smoothed
from cai_apps.report.texts import texts_html
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.starts import FILE, command, read_starts

START = {
    "at": "2026-03-01T10:00:00+00:00", "command": "cai train llama-tiny", "host": "node-1", "system": "Linux",
    "cores": 4, "device": "cuda", "gpu": "NVIDIA H200", "ranks": 2, "step": 0, "versions": {"torch": "2.13.0"},
    "git": {"commit": "0123456789abcdef", "dirty": True},
}  # fmt: skip
AGAIN = START | {"at": "2026-03-02T11:30:00+00:00", "step": 40}


def records(count: int, loss: float = 2.0) -> list[dict]:
    """Records of steps as training writes them."""
    numbers = {
        "grad_norm": 1.0,
        "lr": 0.1,
        "tokens": 8,
        "tokens_per_second": 4.0,
        "mfu": None,
        "step_seconds": 30.0,
    }
    return [
        {"step": step, "loss": loss / step, **numbers, "memory_bytes": 2**30} for step in range(1, count + 1)
    ]


def made(path, *, steps: int, lr: float) -> RunDirectory:
    """A directory as a run leaves it."""
    run = RunDirectory(path)
    run.plots.mkdir(parents=True)
    run.config_file.write_text(
        f"[optimizer]\nlr = {lr}\n[log]\ndirectory = '{path}'\n[train]\ndevice = 'cpu'\n"
    )
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records(steps)))
    (path / FILE).write_text(f"{json.dumps(START)}\nnot a line\n[1]\n{json.dumps(AGAIN)}\n")
    return run


def test_a_page_says_when_where_and_how(tmp_path):
    run = made(tmp_path / "a", steps=3, lr=0.1)
    rows = dict(fact_rows(read_starts(run), records(3)))
    assert rows["started"] == "2026-03-01 10:00, then again 2026-03-02 11:30 from step 40"
    assert rows["command"] == "cai train llama-tiny"
    assert rows["machine"].startswith("node-1: 2 ranks on NVIDIA H200")
    assert rows["versions"] == "torch 2.13.0, commit 0123456789ab with changes"
    assert rows["time in steps"] == "3 steps in 1 min 30 s"


def test_a_run_without_starts_says_what_is_known(tmp_path):
    assert read_starts(RunDirectory(tmp_path)) == []
    assert fact_rows([], [{"step": 1}]) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.21, "4.2 s"), (90, "1 min 30 s"), (3900, "1 h 5 min"), (183600, "2 d 3 h"), (59.96, "60.0 s")],
)
def test_durations_are_words(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["/x/bin/cai", "train", "a b"], "cai train 'a b'"),
        (["/x/site-packages/cai_apps/__main__.py", "train"], "cai train"),
        (["/x/cai_apps/run/launch/script.py", "train"], "cai train"),
        (["loop.py", "--x"], "loop.py --x"),
    ],
)
def test_a_command_is_what_was_typed(arguments, text):
    assert command(arguments) == text


def test_a_smoothed_line_stays_near_its_values():
    assert smoothed([3.0] * 50) == pytest.approx([3.0] * 50)
    line = smoothed([float(number % 2) for number in range(400)])
    assert line[0] == 0.0 and max(abs(value - 0.5) for value in line[100:]) < 0.03


def test_values_that_are_none_make_no_point_and_an_empty_curve_no_frame():
    rows = [{"step": 1, "mfu": None}, {"step": 2, "mfu": 0.4, "mfu_full_attention": None}]
    curve = Curve("MFU", ("mfu", "mfu_full_attention"))
    assert [list(line.get_xdata()) for line in draw(rows, curve).axes[0].lines] == [[2]]
    assert curve.has_points(rows) and not curve.has_points(rows[:1])


def test_planned_kinds_lie_below_what_was_measured():
    (axes,) = draw_memory(records(4), {"weights": 2**28, "gradients": 0, "activations": 2**20}).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["weights, 0.25 GiB", "activations, 1.0 MiB", "measured, 1.00 GiB"]


def test_texts_are_the_first_and_the_last_and_blank_ones_are_named(tmp_path):
    lines = [{"step": step, "name": "p", "text": f"t{step}" if step % 2 else " \n"} for step in range(1, 21)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = texts_html(RunDirectory(tmp_path))
    assert re.findall(r"step (\d+)<", text) == ["1", "14", "15", "16", "17", "18", "19", "20"]
    assert text.count("white space only") == 4


def test_runs_are_compared_by_what_differs(tmp_path, capsys, monkeypatch):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        made(tmp_path / name, steps=30, lr=lr)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a", "b"]) == 0
    assert capsys.readouterr().out.strip() == "comparison.html"
    page = (tmp_path / "comparison.html").read_text()
    assert "<tr><th>optimizer.lr<td>0.1<td>0.2" in page
    assert "log.directory" not in page and "http" not in page.replace("http-equiv", "")
    assert page.count("<img") == 4


def test_configs_that_do_not_differ_are_said_to_be_the_same():
    assert SAME in differences({"a": {"train.steps": "3"}, "b": {"train.steps": "3"}})
    assert "not set" in differences({"a": {"train.steps": "3"}, "b": {}})


def test_runs_of_one_name_have_the_folders_around_them(tmp_path):
    runs = [RunDirectory(tmp_path / folder / "run") for folder in ("x", "y")]
    assert names_of(runs) == ["x/run", "y/run"]
    assert len({*names_of([runs[0], runs[0]])}) == 2


def test_a_name_with_a_formula_is_shown_letter_for_letter():
    (axes,) = draw_runs({"_a $\\frac{$": records(3), "b": records(3)}, Curve("$\\frac{", ("loss",))).axes
    axes.figure.canvas.draw()
    assert len(axes.get_legend().get_texts()) == 2


def test_runs_of_other_kinds_are_not_compared(tmp_path, capsys):
    made(tmp_path / "a", steps=2, lr=0.1)
    made(tmp_path / "b", steps=2, lr=0.1).config_file.write_text('application = "recsys"\n')
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "cannot be compared" in capsys.readouterr().err
