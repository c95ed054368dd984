"""What a tensor-parallel rank receives and keeps is what the closed forms of `cai_tensor_parallel.volume` say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_mode_receives_and_keeps_what_its_closed_form_says(tmp_path):
    out = tmp_path / "volume.json"
    sizes = ["--hidden", "128", "--sequence", "64", "--batch", "32", "--heads", "64", "--ranks", "4,8,16,64"]
    subprocess.run(
        [sys.executable, ROOT / "benchmarks/volume.py", *sizes, "--out", out], check=True, capture_output=True
    )
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 16
    for row in rows:
        assert row["counted"] == pytest.approx(row["formula"], rel=1e-12), row
        assert row["kept"] == pytest.approx(row["kept, formula"], rel=0.1), row
