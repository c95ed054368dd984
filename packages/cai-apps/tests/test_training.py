"""Whole runs through the command, ranks and all: train, resume on another layout, verify, export, generate, report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SMALL = {
    "data.limit_bytes": 100_000,
    "data.sequence_length": 32,
    "train.global_batch": 8,
    "train.microbatch_size": 2,
    "train.validate_every": 3,
    "train.validation_batches": 1,
    "lr_schedule.warmup_steps": 2,
    "lr_schedule.decay_steps": 6,
    "log.every": 1,
    "log.sample_tokens": 8,
}
CUBE = {"parallel.shard": 2, "parallel.tensor.size": 2, "parallel.pipeline.size": 2}
PAIR = {"parallel.shard": 1, "parallel.tensor.size": 1, "parallel.pipeline.size": 2, "parallel.zero": 0}
ALONE = {"parallel.shard": 1, "parallel.tensor.size": 1, "parallel.pipeline.size": 1, "parallel.zero": 0}
MICROBATCHES = {8: 2, 2: 4, 1: 4}


def cai(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "cai_apps", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def train(
    run: Path, cache: Path, layout: dict, ranks: int, **more: object
) -> subprocess.CompletedProcess[str]:
    values = {**SMALL, **layout, "parallel.pipeline.microbatches": MICROBATCHES[ranks], "log.directory": run}
    values |= {"data.cache": cache} | {key.replace("__", "."): value for key, value in more.items()}
    flags = [part for key, value in values.items() for part in (f"--{key}", value)]
    done = cai("train", "llama-tiny", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Six steps on 8 ranks with checkpoints at 3 and 6; a copy stopped at 3 goes on with 2 ranks."""
    place = tmp_path_factory.mktemp("story")
    run, resumed, cache = place / "run", place / "resumed", place / "cache"
    done = train(run, cache, CUBE, 8, train__steps=6, checkpoint__every=3)
    shutil.copytree(run, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-6")
    again = train(resumed, cache, PAIR, 2, train__steps=6)
    alone = place / "alone"
    train(alone, cache, ALONE, 1, train__steps=6, checkpoint__resume="never")
    return SimpleNamespace(
        run=run, resumed=resumed, alone=alone, cache=cache, out=done.stdout, again=again.stdout
    )


def test_run_directory_has_everything(story):
    for name in (
        "config.toml",
        "metrics.jsonl",
        "plots/loss.png",
        "plots/pipeline.svg",
        "tokenizer/tokenizer.json",
    ):
        assert (story.run / name).is_file(), name
    assert (story.run / "export" / "config.json").is_file()
    assert sorted(path.name for path in (story.run / "checkpoints").iterdir()) == ["step-3", "step-6"]
    assert not list((story.run / "crash").iterdir())


def test_output_says_what_happened(story):
    assert "8 cpu ranks" in story.out
    assert "step 6/6  loss" in story.out
    assert "sample" in story.out
    assert "loss plot" in story.out


def test_records(story):
    found = records(story.run)
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[-1]["tokens"] == 6 * 8 * 32
    assert [i + 1 for i, record in enumerate(found) if "validation_loss" in record] == [3, 6]


@pytest.mark.parametrize("other", ["resumed", "alone"])
def test_layouts_and_resumes_train_the_same(story, other):
    for one, two in zip(records(story.run), records(getattr(story, other)), strict=True):
        for field in ("loss", "grad_norm", "lr", "tokens"):
            assert two[field] == pytest.approx(one[field], rel=1e-4), (one["step"], field)


def test_resume_starts_after_the_checkpoint(story):
    assert "step 4/6" in story.again
    assert "step 3/6" not in story.again


def test_export_of_a_checkpoint_is_the_export_of_the_run(story, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    done = cai("export", story.run, tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (story.run / "export", tmp_path / "hf")]
    for (name, one), (_, two) in zip(*(model.state_dict().items() for model in models), strict=True):
        assert torch.equal(one, two), name


def test_verify_finds_a_flipped_bit(story, tmp_path):
    checkpoint = tmp_path / "step-6"
    shutil.copytree(story.run / "checkpoints" / "step-6", checkpoint)
    assert cai("verify", checkpoint).returncode == 0
    victim = max(
        (path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    done = cai("verify", checkpoint)
    assert done.returncode == 2
    assert victim.name in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_and_report(story):
    done = cai("generate", story.run, "--prompt", "import", "--tokens", 4)
    assert done.returncode == 0
    assert done.stdout.startswith("import")
    assert cai("report", story.run).returncode == 0
    page = (story.run / "report.html").read_text()
    assert page.count("<svg") == 5


def test_checkpoint_of_another_architecture(story):
    flags = [
        "--log.directory",
        story.run.parent / "other",
        "--data.cache",
        story.cache,
        "--checkpoint.resume",
    ]
    flags += [story.run, "--parallel.tensor.size", 1, "--parallel.pipeline.size", 1, "--train.steps", 9]
    flags[-7] = story.run / "checkpoints" / "step-6"
    done = cai("train", "gpt2-tiny", *flags)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1
