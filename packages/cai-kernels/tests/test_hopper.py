"""Every kernel compiles for a Hopper GPU, without one, and none spills its registers at the sizes that matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "hopper").glob("*.py"))
SMALL = ("dropout_add", "embedding", "gated", "global_norm", "rope")
"""Seconds each. The others take up to a minute: for `nox -s matrix`, and `nox -s oldest` with another Triton."""
SPILLED = 32  # bytes a thread: a word or two of addresses costs nothing
SHARED = 227 * 1024  # what a program may take on an H100 or H200


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=() if f.stem in SMALL else pytest.mark.matrix, id=f.stem) for f in FILES],
)
def test_kernels_compile_for_hopper_and_do_not_spill(file: Path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "compile_kernels.py"), str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels
    for kernel in kernels:
        assert kernel["spilled"] <= SPILLED and kernel["shared"] <= SHARED, kernel
