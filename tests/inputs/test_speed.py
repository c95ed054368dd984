"""Errors of a config come before torch and transformers are loaded, and soon."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

PROGRAM = """
import sys
from cai_apps.cli import main
code = main(sys.argv[1:])
print(code, sorted(name for name in ("torch", "transformers", "diffusers") if name in sys.modules))
"""
WRONG = {
    "range": ("llama-tiny", "--optimizer.lr=nan"),
    "batch": ("llama-tiny", "--train.global_batch=3"),
    "heads": ("llama-tiny", "--parallel.tensor.size=3"),
    "grid": ("llama-tiny", "--parallel.tensor.mode=2d", "--parallel.tensor.size=3"),
    "size": ("llama-tiny-offload", "--memory.device_memory=much"),
    "GPT-2": ("gpt2-tiny", "--data.sequence_length=100000"),
    "warm-up": ("sd-shapes", "--train.steps=3"),
    "design": ("sd-v1-tiny", "--data.size=33"),
    "preset": ("alphafold-tiny", "--model.name=alphafold-2"),
    "tables": ("dlrm-tiny", "--tables.dim=17"),
}


@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG)
def test_a_config_is_checked_before_torch_is_loaded(arguments):
    since = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "2 []", done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert time.monotonic() - since < 3
