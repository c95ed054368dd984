from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cai_apps.run.loop import metrics
from cai_apps.run.loop.metrics import Metrics, Records
from cai_mesh.errors import DataError


def record(step, **more):
    return Metrics(step, 1.0, 1.0, 0.1, "tokens", 8, 4.0, 0.0, {"mfu": None}, 2**20, 2.0, **more)


def test_fields_of_a_record(tmp_path):
    Records(tmp_path / "m.jsonl").write(record(1).record())
    (line,) = (tmp_path / "m.jsonl").read_text().splitlines()
    wanted = "step loss grad_norm lr tokens tokens_per_second tflops mfu memory_bytes step_seconds"
    assert set(wanted.split()) <= set(json.loads(line))
    assert "validation_loss" not in line


def test_resume_keeps_earlier_records_and_drops_repeated_ones(tmp_path):
    file = Records(tmp_path / "m.jsonl")
    for step in range(1, 6):
        file.write(record(step).record())
    file.close()
    Records(tmp_path / "m.jsonl", from_step=3).write(record(4, validation_loss=2.0).record())
    records = metrics.read(tmp_path / "m.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert records[-1]["validation_loss"] == 2.0


def test_half_a_last_line_is_left_out(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st')
    assert metrics.read(tmp_path / "m.jsonl") == [{"step": 1}]


def test_broken_line_in_the_middle(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"m\.jsonl:2"):
        metrics.read(tmp_path / "m.jsonl")


def test_no_file(tmp_path):
    with pytest.raises(DataError, match="no metrics"):
        metrics.read(tmp_path / "m.jsonl")


def test_a_start_that_is_killed_keeps_the_records(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    first = Records(path)
    first.write(record(1).record())
    first.close()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        Records(path, from_step=1)
    assert [each["step"] for each in metrics.read(path)] == [1]


def test_a_full_disk_is_told(tmp_path):
    file = Records(tmp_path / "m.jsonl")
    file.close()
    with Path("/dev/full").open("a") as file._file:
        with pytest.raises(DataError, match=r"(?s)cannot be written.*step 3.*No space left on device"):
            file.write(record(3).record())
        file.close()
