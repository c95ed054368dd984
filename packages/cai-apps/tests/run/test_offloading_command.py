"""The recipe of a model larger than its device through the command: train, resume, report, in fresh directories."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from cai_apps.cli import main
from cai_gemini import Timeline

RECIPE = "llama-tiny-offload"
SMALL = {
    "data.limit_bytes": 100_000,
    "data.sequence_length": 32,
    "train.steps": 6,
    "train.global_batch": 8,
    "train.microbatch_size": 2,
    "train.validate_every": 3,
    "train.validation_batches": 1,
    "optimizer.clip": 1e6,  # the order in which squares of gradients are summed differs with the residency
    "checkpoint.every": 3,
    "log.every": 1,
    "log.sample_tokens": 0,
}
ON_DEVICE = {"memory.residency": "device", "memory.device_memory": "None", "memory.activations": "device"}
BUDGET = 6_000_000


def cai(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def train(run, cache, **values) -> int:
    values = {**SMALL, **values, "log.directory": run, "data.cache": cache}
    return cai("train", RECIPE, *(part for key, value in values.items() for part in (f"--{key}", value)))


def records(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(run) -> list[tuple]:
    return [(r["step"], r["loss"], r["lr"], r.get("validation_loss")) for r in records(run)]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Six steps; the same from step 3 on, in a copy; and the same with everything on the device."""
    place = tmp_path_factory.mktemp("offload")
    run, resumed, plain, cache = (place / name for name in ("run", "resumed", "plain", "cache"))
    assert train(run, cache) == 0
    shutil.copytree(run, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-6")
    (resumed / "plots" / "offload.timeline.json").unlink()
    assert train(resumed, cache) == 0
    assert train(plain, cache, **ON_DEVICE) == 0
    return SimpleNamespace(run=run, resumed=resumed, plain=plain, cache=cache)


@pytest.mark.parametrize("other", ["resumed", "plain"])
def test_it_trains_as_on_the_device_and_resumes(story, other):
    assert numbers(getattr(story, other)) == numbers(story.run)


def test_records_say_what_stays_where(story):
    found = records(story.run)
    assert found[0]["device_bytes"] < found[-1]["device_bytes"] < BUDGET < found[-1]["host_bytes"]
    assert "host_bytes" not in records(story.plain)[-1]


@pytest.mark.parametrize("which", ["run", "resumed"])
def test_one_step_is_drawn(story, which):
    run = getattr(story, which)
    timeline = Timeline.load(run / "plots" / "offload.timeline.json")
    assert timeline.budget == BUDGET
    used = {name for _, _, name in timeline.lanes["compute"]}
    assert len(used) == 5
    assert {name for _, _, name in timeline.lanes["host"]} < used
    assert max(sum(values) for values in zip(*timeline.memory.values(), strict=True)) <= BUDGET
    assert cai("report", run) == 0
    assert "<h2>A step with training state in several memories</h2><img" in (run / "report.html").read_text()
    assert not (story.plain / "plots" / "offload.timeline.json").exists()


def test_the_plan_is_told_once(story, tmp_path, capsys):
    assert train(tmp_path / "run", story.cache, **{"train.steps": 4}) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("offload: ")]
    assert len(told) == 1
    assert "of 5 chunks stay on the device, state of" in told[0]


def test_a_device_that_is_too_small_says_what_would_do(story, tmp_path, capsys):
    assert train(tmp_path / "run", story.cache, **{"memory.device_memory": "1MB"}) == 2
    said = capsys.readouterr().err
    assert "the device memory is too small for one layer at a time" in said
    assert "expected: more than" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
