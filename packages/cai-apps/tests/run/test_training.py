"""Whole runs through the command, ranks and all: train, resume on another layout, verify, export, generate, report."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_runs import ALONE, CUBE, PAIR, attempt, cai, flags, records, train


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Six steps on 8 ranks with checkpoints at 3 and 6; a copy stopped at 3 goes on with 2 ranks."""
    place = tmp_path_factory.mktemp("story")
    run, resumed, cache = place / "run", place / "resumed", place / "cache"
    tracked = {"log__trackers": "tensorboard", "log__prompts": "import"}
    traced = {"log__trace": "2-3", "log__snapshot": "3", "log__trace_ranks": 5}
    done = train(run, cache, CUBE, train__steps=6, checkpoint__every=3, **tracked, **traced)
    shutil.copytree(run, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-6")
    options = {"checkpoint__every": 1, "checkpoint__background": "on", **tracked}
    again = train(resumed, cache, PAIR, train__steps=6, **options)
    alone = place / "alone"
    train(alone, cache, ALONE, train__steps=6, checkpoint__resume="never", **tracked)
    return SimpleNamespace(
        run=run, resumed=resumed, alone=alone, cache=cache, out=done.stdout, again=again.stdout
    )


def test_run_directory_has_everything(story):
    for name in (
        "config.toml",
        "metrics.jsonl",
        "plots/loss.png",
        "plots/pipeline.svg",
        "plots/pipeline.trace.json",
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
    assert f"checkpoint     {story.run / 'checkpoints' / 'step-6'}" in story.out


def test_records(story):
    found = records(story.run)
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[-1]["tokens"] == 6 * 8 * 32
    assert [i + 1 for i, record in enumerate(found) if "validation_loss" in record] == [3, 6]


def test_a_chosen_rank_traces_chosen_steps(story):
    (trace,) = (story.run / "traces").glob("*.gz")
    assert trace.name == "rank-5.steps-2-3.json.gz"
    assert f"trace of rank 5: {trace}" in story.out
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("step ")] == ["step 2", "step 3"]
    assert any(event["name"] == "aten::mm" for event in events)
    assert not (story.alone / "traces").exists()


def test_a_cpu_has_no_snapshot_and_says_so(story):
    (snapshot,) = (story.run / "snapshots").iterdir()
    fields = json.loads(snapshot.read_text())
    assert (fields["rank"], fields["step"]) == (5, 3)
    assert "no snapshot" in fields["message"]


@pytest.mark.parametrize("name", ["run", "resumed", "alone"])
def test_a_tracker_has_each_step_once(story, name):
    """Of the resumed run too, whose first start wrote six steps, of which three were trained again."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    run = getattr(story, name)
    events = EventAccumulator(str(run / "tensorboard"))  # as tensorboard itself reads them
    events.Reload()
    losses = [
        (event.step, pytest.approx(float(make_ndarray(event.tensor_proto)), rel=1e-6))
        for event in events.Tensors("train/loss")
    ]
    assert losses == [(record["step"], record["loss"]) for record in records(run)]
    for tag in ("eval/loss", "eval/accuracy", "eval/perplexity", "samples/1/text_summary"):
        assert [event.step for event in events.Tensors(tag)] == [3, 6]
    identities = {json.loads((story.run / "trackers.json").read_text())["id"]}
    identities |= {json.loads((story.resumed / "trackers.json").read_text())["id"]}
    assert len(identities) == 1


def test_prompts_are_continued_alike_on_every_layout(story):
    """By a pipeline of tensor-parallel ranks, by a pipeline and by one process."""
    one, two, three = (
        [json.loads(line) for line in (run / "texts.jsonl").read_text().splitlines()]
        for run in (story.run, story.resumed, story.alone)
    )
    assert one == two == three
    assert [(record["step"], record["name"]) for record in one] == [(3, "import"), (6, "import")]
    assert all(record["text"] for record in one)


def test_accuracy_and_perplexity_are_recorded(story):
    import math

    for one, two in zip(records(story.run), records(story.alone), strict=True):
        assert ("validation_accuracy" in one) == ("validation_loss" in one)
        if "validation_loss" in one:
            assert 0 < one["validation_accuracy"] == pytest.approx(two["validation_accuracy"], rel=0.02)
            assert one["validation_perplexity"] == pytest.approx(math.exp(one["validation_loss"]))


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


def damage(checkpoint: Path, how: str) -> Path:
    """Damages the largest file of a checkpoint; returns the file."""
    victim = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif how == "truncated":
        victim.write_bytes(content[:-1])
    else:
        victim.unlink()
    return victim


def assert_said_once(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """The command ended as for an error of the user, with `parts` in its one message."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_verify_finds_a_flipped_bit(story, tmp_path):
    checkpoint = tmp_path / "step-6"
    shutil.copytree(story.run / "checkpoints" / "step-6", checkpoint)
    assert cai("verify", checkpoint).returncode == 0
    victim = damage(checkpoint, "flipped")
    assert_said_once(cai("verify", checkpoint), victim.name)


def test_resume_passes_over_a_damaged_checkpoint(story, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(story.run, run)
    victim = damage(run / "checkpoints" / "step-6", "flipped")
    done = train(run, story.cache, ALONE, train__steps=6)
    assert "passing over checkpoints" in done.stdout
    assert str(victim) in done.stdout
    assert f"resumed from {run / 'checkpoints' / 'step-3'}" in done.stdout
    assert records(run)[-1]["loss"] == pytest.approx(records(story.run)[-1]["loss"], rel=1e-4)


@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_resume_from_a_damaged_checkpoint_names_the_file(story, tmp_path, how):
    checkpoint = tmp_path / "step-6"
    shutil.copytree(story.run / "checkpoints" / "step-6", checkpoint)
    victim = damage(checkpoint, how)
    done = attempt(tmp_path / "run", story.cache, ALONE, train__steps=7, checkpoint__resume=checkpoint)
    assert_said_once(done, victim.name)


def test_loss_that_is_not_finite_ends_all_ranks_with_one_message(story, tmp_path):
    wild = {"optimizer__lr": 1e30, "optimizer__clip": 1e30}
    assert_said_once(attempt(tmp_path / "run", story.cache, PAIR, train__steps=6, **wild), "is not finite")
    assert "is not finite" in (tmp_path / "run" / "crash" / "rank-0.txt").read_text()


def test_generate_and_report(story):
    done = cai("generate", story.run, "--prompt", "import", "--tokens", 4)
    assert done.returncode == 0
    assert done.stdout.startswith("import")
    assert cai("report", story.run).returncode == 0
    page = (story.run / "report.html").read_text()
    assert "<h2>Traces</h2>" in page and "aten::mm" in page
    assert "<h3>rank 5, step 3</h3><p>no snapshot" in page
    assert "<h2>Samples by step</h2>" in page and "last validation accuracy" in page
    assert page.count("<img") == 6  # four curves, memory, and a step of the pipeline


def test_checkpoint_of_another_architecture(story, tmp_path):
    (tmp_path / "wide").mkdir()
    shape = json.loads((story.run / "export" / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps(shape | {"intermediate_size": 320}))
    model = {"model__name": tmp_path / "wide", "checkpoint__resume": story.run / "checkpoints"}
    done = attempt(tmp_path / "run", story.cache, PAIR, train__steps=7, **model)
    assert_said_once(done, "is of another model", "mlp.down_proj.weight: this model (128, 320)")


def test_run_that_would_write_over_checkpoints(story):
    done = attempt(story.run, story.cache, PAIR, train__steps=6, checkpoint__resume="never")
    assert_said_once(done, "already has checkpoints", "step-3, step-6")


def test_launcher_trains_the_same(story, tmp_path):
    own = flags(tmp_path / "run", story.cache, PAIR, train__steps=6)
    done = cai("run", "--nproc-per-node", 2, "train", "llama-tiny", *own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 6/6") == 1
    last, expected = records(tmp_path / "run")[-1], records(story.run)[-1]
    assert last["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_launcher_with_a_mesh_that_does_not_fit(story, tmp_path):
    own = flags(tmp_path / "run", story.cache, CUBE, train__steps=6)
    done = cai("run", "--nproc-per-node", 2, "train", "llama-tiny", *own)
    assert done.returncode != 0
    assert done.stderr.count("the mesh does not fit the number of ranks") == 1
    assert "Traceback" not in done.stderr
