"""A checkpoint is proven once the step after it is finite; a run that stopped goes on from the newest proven one."""

from __future__ import annotations

import json

import pytest

from cai_apps.cli import main
from cai_apps.run.files import proof
from cai_apps.run.loop.metrics import read

SMALL = (
    "train", "llama-tiny", "--train.device=cpu", "--parallel.shard=1", "--parallel.tensor.size=1",
    "--parallel.pipeline.size=1", "--data.limit_bytes=20000", "--data.sequence_length=16", "--train.global_batch=1",
    "--train.microbatch_size=1", "--train.validate_every=0", "--log.sample_tokens=0", "--lr_schedule.warmup_steps=0",
    "--checkpoint.every=1",
)  # fmt: skip


@pytest.fixture
def checkpoints(tmp_path):
    for step in (3, 4, 12):
        (tmp_path / f"step-{step}").mkdir()
    return tmp_path


def test_from_the_last_finite_step_on_none_is_proven(checkpoints):
    steps = [checkpoints / f"step-{step}" for step in (3, 4, 12)]
    assert proof.unproven(checkpoints, steps) == set(), "a run that was killed has said nothing"
    for last_finite, expected in {3: steps, 4: steps[1:], 5: steps[2:], 13: []}.items():
        proof.mark(checkpoints, last_finite)
        assert proof.unproven(checkpoints, steps) == set(expected)


@pytest.mark.parametrize("text", ["", "[]", '{"last_finite": null}', "\xff", '{"last_finite": "a"}'])
def test_a_damaged_mark_says_nothing(checkpoints, text):
    (checkpoints / proof.MARK).write_text(text, encoding="latin-1")
    assert proof.unproven(checkpoints, [checkpoints / "step-12"]) == set()


def test_what_is_laid_aside_takes_no_others_place(checkpoints):
    proof.mark(checkpoints, 4)
    (checkpoints / "step-4.unproven").mkdir()
    proof.lay_aside(checkpoints, [checkpoints / "step-4", checkpoints / "step-12"])
    assert {path.name for path in checkpoints.iterdir()} == {
        "step-3", "step-4.unproven", "step-4.unproven-1", "step-12.unproven",
    }  # fmt: skip


def test_a_lower_rate_goes_on_from_before_the_step_that_broke_it(tmp_path, capsys):
    """Step 4 is finite, and its weights are not to be trained further: step 5 is not finite at any rate."""
    run = tmp_path / "run"
    places = (f"--data.cache={tmp_path / 'cache'}", f"--log.directory={run}", "--checkpoint.keep_last=1")

    def go(steps: int, rate: str) -> int:
        return main([*SMALL, *places, f"--train.steps={steps}", f"--optimizer.lr={rate}"])

    assert go(3, "0.001") == 0
    assert go(6, "1e25") == 2
    told = capsys.readouterr()
    assert "step 5 is not finite" in told.err and f"--log.directory {run}" in told.out
    assert json.loads((run / "checkpoints" / proof.MARK).read_text()) == {"last_finite": 4}
    assert {path.name for path in (run / "checkpoints").glob("step-*")} == {"step-3", "step-4"}, (
        "the proven one stays"
    )
    assert go(6, "0.001") == 0
    told = capsys.readouterr().out
    assert "step-4: unproven" in told and "resumed from" in told and "step-3\n" in told
    assert [record["step"] for record in read(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-4.unproven", "step-5", "step-6"}
