"""Runs on preferences that are killed at every step end as one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import killed_adapters
import pytest
import torch
from safetensors.torch import load_file
from trl_toys import PAIRS, judged, pair, write_model, write_records

STEPS = killed_adapters.STEPS
OPTIONS = {
    "model.weights": "pretrained",
    "data.sequence_length": 96,
    "data.validation_fraction": 0.0,
    "optimizer.lr": 0.05,
    "lr_schedule.warmup_steps": 0,
    "lr_schedule.decay_steps": STEPS,
    "lora.rank": 4,
    "log.sample_tokens": 0,
    "train.steps": STEPS,
    "train.global_batch": 2,
    "train.microbatch_size": 1,
    "train.validate_every": 0,
    "train.device": "cpu",
    "train.compile": "off",
    "parallel.shard": 1,
}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("recipe", "reference"), [("dpo", "adapter"), ("dpo", "computed"), ("kto", "adapter"), ("rm", None)]
)
def test_a_sigkill_at_any_step_loses_nothing(tmp_path, recipe, reference):
    records = judged([True, False, True, False]) if recipe == "kto" else [pair(*texts) for texts in PAIRS]
    records = records * 3
    values = OPTIONS | {
        "model.name": write_model(tmp_path / "model", 1),
        "data.source": write_records(tmp_path / "records.jsonl", records),
        "data.cache": tmp_path / "cache",
    }
    if reference is not None:
        values["reference.form"] = reference
    words = ["train", recipe, *(f"--{key}={value}" for key, value in values.items())]
    command = [sys.executable, killed_adapters.__file__, tmp_path, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    whole, killed = (
        load_file(tmp_path / name / "export" / "adapter_model.safetensors") for name in ("whole", "killed")
    )
    assert whole.keys() == killed.keys() and all(torch.equal(whole[name], killed[name]) for name in whole)
    whole, killed = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "killed")
    )
    assert [line["step"] for line in killed] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in killed] == [line["loss"] for line in whole]
