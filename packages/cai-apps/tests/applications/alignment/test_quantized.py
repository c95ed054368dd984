"""Beside a base in codes, the reference has the same codes: nothing is better or worse before the first step."""

from __future__ import annotations

import json
import math
import re

import pytest
from transformers import AutoModelForSequenceClassification
from trl_toys import PAIRS, pair, write_model, write_records

from cai_apps.cli import main

pytest.importorskip("peft")
OPTIONS = {
    "model.weights": "pretrained",
    "data.sequence_length": 96,
    "data.validation_fraction": 0.0,
    "optimizer.lr": 0.05,
    "lr_schedule.warmup_steps": 0,
    "lora.rank": 4,
    "lora.base": "nf4",
    "log.sample_tokens": 0,
    "precision.compute": "fp32",
    "train.steps": 2,
    "train.global_batch": 1,
    "train.microbatch_size": 1,
    "train.validate_every": 0,
    "train.device": "cpu",
    "train.compile": "off",
    "parallel.shard": 1,
}


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The losses of two steps by the form of the reference."""
    home = tmp_path_factory.mktemp("codes")
    model = write_model(home / "model", 1, hidden_size=64, intermediate_size=128)
    values = OPTIONS | {"model.name": model, "data.cache": home / "cache"}
    values["data.source"] = write_records(home / "pairs.jsonl", [pair(*texts) for texts in PAIRS] * 3)

    def of(form: str, **more: str) -> list[float]:
        run = home / f"{form}-{len(list(home.iterdir()))}"
        words = values | {"reference.form": form, "log.directory": run} | more
        assert main(["train", "dpo", *(f"--{key}={value}" for key, value in words.items())]) == 0
        return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]

    return of


def test_before_the_first_step_nothing_is_better(losses):
    computed = losses("computed")
    assert computed[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses("adapter") == pytest.approx(computed, rel=1e-5)
    plain = losses("computed", **{"lora.base": "compute"})  # what was computed of codes is not taken for it
    assert plain[0] == pytest.approx(math.log(2), rel=1e-6)
    assert abs(plain[1] - computed[1]) > 1e-4


@pytest.mark.matrix
def test_a_reference_beside_the_model_is_the_same(losses):
    assert losses("model") == pytest.approx(losses("computed"), rel=1e-5)


@pytest.mark.matrix
def test_a_reward_model_beside_codes_goes_on_and_is_merged(tmp_path, capsys):
    model = write_model(tmp_path / "model", 1, hidden_size=64, intermediate_size=128)
    values = OPTIONS | {
        "model.name": model,
        "data.cache": tmp_path / "cache",
        "log.directory": tmp_path / "run",
    }
    values["data.source"] = write_records(tmp_path / "pairs.jsonl", [pair(*texts) for texts in PAIRS] * 3)
    for steps in (2, 4):
        words = values | {"train.steps": steps}
        assert main(["train", "rm", *(f"--{key}={value}" for key, value in words.items())]) == 0
    shown = re.search(r"nf4 holds ([\d,]+) of ([\d,]+) frozen weights", capsys.readouterr().out)
    linear = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    others = 640 * 64 + 5 * 64  # the embedding and the norms
    assert shown is not None and [int(number.replace(",", "")) for number in shown.groups()] == [
        linear,
        linear + others,
    ]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    opened = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "merged", num_labels=1, output_loading_info=True
    )
    assert not opened[1]["missing_keys"] and not opened[1]["unexpected_keys"]
