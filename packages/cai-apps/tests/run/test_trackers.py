"""What trackers are given, once a step, whatever they do with it; files of events are read back as they are."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cai_apps.applications.language.config import Config
from cai_apps.config import file as config_file
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.git_state import git_state
from cai_apps.run.loop.metrics import Metrics
from cai_apps.run.trackers import table, trackers
from cai_apps.run.trackers.lane import Lane
from cai_apps.run.trackers.table import Row
from cai_apps.run.trackers.trackers import Trackers, scalars_of
from cai_apps.run.trackers.writer import Identity
from cai_apps.run.train import train
from cai_mesh.errors import ConfigError

IDENTITY = Identity("abc", "run", None, Path("run"))


class Kept:
    """A writer that keeps what it is given, and fails where it is told to."""

    def __init__(self, fails=lambda what, step: False):
        self.started, self.steps, self.texts, self.finished = [], [], [], 0
        self.fails, self.thread = fails, None

    def _enter(self, what, step=0):
        self.thread = threading.current_thread()
        if self.fails(what, step):
            raise OSError(f"no room for the {what} of {step}\nand more")

    def start(self, config, identity):
        self._enter("start")
        self.started.append((config, identity))

    def scalars(self, step, values):
        self._enter("scalars", step)
        self.steps.append((step, values))

    def text(self, step, name, text):
        self._enter("text", step)
        self.texts.append((step, name, text))

    def finish(self):
        self._enter("finish")
        self.finished += 1


def written(writer, steps=range(1, 6), **options):
    """Lines that are said while a lane writes some steps."""
    lines = []
    lane = Lane("wandb", writer, say=lines.append, pause=0.01, **options)
    lane.start({}, IDENTITY)
    for step in steps:
        lane.scalars(step, {"train/loss": 1.0 / step})
        lane.text(step, "samples/1", "text")
    lane.close(5.0)
    return lines


def test_everything_arrives_in_its_order_from_another_thread():
    writer = Kept()
    assert written(writer) == []
    assert [step for step, _ in writer.steps] == [1, 2, 3, 4, 5] == [step for step, _, _ in writer.texts]
    assert len(writer.started) == writer.finished == 1
    assert writer.thread is not threading.main_thread()


def test_a_write_that_fails_is_told_in_one_line_and_left_out():
    writer = Kept(lambda what, step: what == "scalars" and step in (2, 4))
    lines = written(writer)
    assert lines == [
        f"tracker wandb: numbers of step {step} failed, the run goes on (OSError: no room for the scalars of {step})"
        for step in (2, 4)
    ]
    assert [step for step, _ in writer.steps] == [1, 3, 5]
    assert writer.finished == 1


def test_a_start_that_fails_is_tried_again():
    attempts = []
    writer = Kept(lambda what, step: what == "start" and (attempts.append(1) or len(attempts) < 3))
    (line,) = written(writer)
    assert "start failed" in line
    assert [step for step, _ in writer.steps] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("what", ["start", "scalars"])
def test_what_fails_always_is_dropped_with_a_note(what):
    writer = Kept(lambda what_fails, step: what_fails in (what, "text"))
    first, last = written(writer)
    assert "failed" in first and "dropped after 3 failures; metrics.jsonl has all numbers" in last
    assert not writer.steps and not writer.finished


@pytest.mark.parametrize("where", ["start", "scalars", "finish"])
def test_what_hangs_is_left_and_nobody_waits(where):
    forever = threading.Event()
    writer = Kept(lambda what, step: what == where and forever.wait())
    lines = []
    lane = Lane("wandb", writer, say=lines.append)
    began = time.monotonic()
    lane.start({}, IDENTITY)
    for step in range(1, 20_000):
        lane.scalars(step, {})
    lane.close(0.2)
    assert time.monotonic() - began < 5
    assert "not finished after 0 s and left so" in lines[-1]
    if where != "finish":
        (full,) = lines[:-1]
        assert "does not keep up" in full
    forever.set()


def config_of(*names, **log):
    config = Config()
    return replace(config, log=replace(config.log, trackers=names, **log))


def record(step, loss, **more):
    metrics = Metrics(step, loss, 1.0, 0.1, "tokens", 8, 4.0, None, {"mfu": None}, 2**20, 2.0, **more)
    return metrics.record()


def test_numbers_have_the_names_of_the_trainer_of_transformers():
    from transformers.integrations.integration_utils import rewrite_logs

    found = scalars_of(
        record(1, 2.0, validation_loss=3.0, validation_accuracy=0.5, validation_perplexity=20.0)
    )
    theirs = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "eval_loss": 3.0}
    assert rewrite_logs(theirs).items() <= found.items()
    assert found["eval/accuracy"], found["eval/perplexity"] == (0.5, 20.0)
    assert found["train/tokens_per_second"] == 4.0
    measured = record(
        1, 2.0, measures={"rewards/margins": 3.0}, validation_measures={"validation_rewards/margins": 4.0}
    )
    assert {"train/rewards/margins": 3.0, "eval/rewards/margins": 4.0}.items() <= scalars_of(measured).items()
    assert not {"train/tflops", "train/mfu", "train/step"} & found.keys()
    assert "train/grad_norm" not in scalars_of(record(1, 2.0) | {"grad_norm": float("inf")})


def started(run, config, step, written, losses):
    """A start of a run that trains some steps, after an earlier one left `written`."""
    every = Trackers(config, run, step=step, written=written)
    for number, loss in enumerate(losses, step + 1):
        texts = {"samples/1": f"step {number}\nof <b>{loss}</b>"} if number % 2 == 0 else {}
        every.record(record(number, loss), texts)
    every.close()


def losses_of(accumulator):
    from tensorboard.util.tensor_util import make_ndarray

    return [(e.step, float(make_ndarray(e.tensor_proto))) for e in accumulator.Tensors("train/loss")]


def events(run):
    """The events of a run as tensorboard itself reads them."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.path / "tensorboard"))
    accumulator.Reload()
    return accumulator


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    return run


def test_files_of_events_are_read_back(run):
    pytest.importorskip("tensorboard")
    started(run, config_of("tensorboard"), 0, 0, [5.0, 4.0, 3.0])
    found = events(run)
    assert losses_of(found) == [(1, 5.0), (2, 4.0), (3, 3.0)]
    assert {"train/learning_rate", "train/grad_norm", "train/memory_bytes"} <= {*found.Tags()["tensors"]}
    (text,) = found.Tensors("samples/1/text_summary")
    assert text.step == 2 and b"step 2" in text.tensor_proto.string_val[0]
    (config,) = found.Tensors("config/text_summary")
    assert b"global_batch" in config.tensor_proto.string_val[0]
    assert (run.path / "tensorboard").stat().st_mode & 0o777 == 0o700


def test_steps_that_are_trained_again_are_not_doubled_in_files_of_events(run):
    pytest.importorskip("tensorboard")
    started(run, config_of("tensorboard"), 0, 0, [5.0, 4.0, 3.0, 2.0, 1.0])
    before = json.loads((run.path / "trackers.json").read_text())["id"]
    started(run, config_of("tensorboard"), 3, 5, [20.0, 10.0, 0.0])
    assert losses_of(events(run)) == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 20.0), (5, 10.0), (6, 0.0)]
    assert json.loads((run.path / "trackers.json").read_text())["id"] == before
    started(run, config_of("tensorboard"), 0, 6, [7.0])
    assert json.loads((run.path / "trackers.json").read_text())["id"] != before
    assert losses_of(events(run)) == [(1, 7.0)]


def test_trackers_that_keep_a_step_twice_are_not_given_it_again(run, monkeypatch):
    writers = []
    monkeypatch.setitem(table.ROWS, "wandb", Row(lambda: writers.append(Kept()) or writers[-1]))
    monkeypatch.setitem(table.ROWS, "trackio", Row(lambda: writers.append(Kept()) or writers[-1]))
    started(run, config_of("wandb"), 0, 0, [5.0, 4.0, 3.0, 2.0])
    started(run, config_of("wandb", "trackio", project="mine"), 2, 4, [20.0, 10.0, 0.0])
    first, second, added = writers
    assert [step for step, _ in first.steps] == [1, 2, 3, 4]
    assert [step for step, _ in second.steps] == [5]
    assert [step for step, _ in added.steps] == [3, 4, 5], "it had none of them"
    (config, identity), (_, resumed) = first.started[0], second.started[0]
    assert identity.id == resumed.id and (identity.resumed, resumed.resumed) == (False, True)
    assert (identity.name, resumed.project, resumed.first_step) == ("run", "mine", 3)
    assert config["train"]["global_batch"] == 8 and json.dumps(config)


def test_a_third_start_gives_no_step_twice(run, monkeypatch):
    """The second start was killed before it came as far as the first: its last record is not the last there was."""
    writers = []
    monkeypatch.setitem(table.ROWS, "wandb", Row(lambda: writers.append(Kept()) or writers[-1]))
    started(run, config_of("wandb"), 0, 0, [5.0, 4.0, 3.0, 2.0])
    started(run, config_of("wandb"), 1, 4, [40.0])
    started(run, config_of("wandb"), 1, 2, [40.0, 30.0, 20.0, 10.0])
    assert [[step for step, _ in writer.steps] for writer in writers] == [[1, 2, 3, 4], [], [5]]


def test_one_that_hangs_takes_no_time_from_the_others(run, monkeypatch):
    forever, other = threading.Event(), Kept()
    monkeypatch.setitem(table.ROWS, "wandb", Row(lambda: Kept(lambda what, step: forever.wait())))
    monkeypatch.setitem(table.ROWS, "trackio", Row(lambda: other))
    monkeypatch.setattr(trackers, "SECONDS", 1.0)
    started(run, config_of("wandb", "trackio"), 0, 0, [5.0, 4.0])
    assert [step for step, _ in other.steps] == [1, 2] and other.finished
    forever.set()


def test_nothing_is_kept_where_nobody_tracks(run):
    started(run, config_of(), 0, 0, [5.0])
    assert not list(run.path.iterdir())


def test_a_tracker_that_hangs_holds_the_end_of_a_run_for_a_while_only(run, monkeypatch):
    forever = threading.Event()
    monkeypatch.setitem(table.ROWS, "wandb", Row(lambda: Kept(lambda what, step: forever.wait())))
    monkeypatch.setattr(trackers, "SECONDS", 0.2)
    began = time.monotonic()
    started(run, config_of("wandb"), 0, 0, [5.0, 4.0])
    assert time.monotonic() - began < 5
    forever.set()


def test_a_tracker_that_is_not_installed_is_refused_before_anything(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    with pytest.raises(ConfigError, match=r"(?s)wandb is not installed.*pip install 'cai-apps\[wandb\]'"):
        train(None, config_of("wandb"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "offered"), [("tensorbord", "tensorboard"), ("wandd", "wandb"), ("trakio", "trackio")]
)
def test_an_unknown_tracker_offers_the_closest(name, offered):
    with pytest.raises(ConfigError, match=f"(?s)log.trackers.*{name}.*did you mean '{offered}'"):
        config_file.change(Config(), {"log.trackers": ["tensorboard", name]})


def git(*arguments, at):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=at, check=True, capture_output=True).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    place = tmp_path / "code"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    git("init", at=place)
    return place


def test_the_state_of_a_repository(repository):
    assert git_state() == {}, "no commit"
    (repository / "a.py").write_text("one\n")
    git("add", ".", at=repository)
    git("commit", "-m", "a", at=repository)
    commit = git("rev-parse", "HEAD", at=repository).decode().strip()
    clean = {"commit": commit, "dirty": False, "untracked": 0, "diff": None}
    assert git_state() == {"git": clean}
    (repository / "b.py").write_text("new\n")
    assert git_state() == {"git": clean | {"untracked": 1}}
    digests = set()
    for text in ("two\n", "three\n"):
        (repository / "a.py").write_text(text)
        found = git_state()["git"]
        assert found["dirty"] and len(found["diff"]) == 64
        digests.add(found["diff"])
    assert len(digests) == 2


def test_outside_of_a_repository_and_without_git_there_is_no_state(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert git_state() == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() == {}


def test_no_program_of_a_repository_runs(repository):
    (repository / "a.py").write_text("one\n")
    (repository / ".gitattributes").write_text("*.py diff=mine filter=mine\n")
    git("add", ".", at=repository)
    git("commit", "-m", "a", at=repository)
    program = repository / "program"
    program.write_text(f"#!/bin/sh\ntouch {repository}/ran\n")
    program.chmod(0o755)
    filters = ("filter.mine.clean", "filter.mine.process")
    for key in ("core.fsmonitor", "diff.external", "diff.mine.command", "diff.mine.textconv", *filters):
        git("config", key, str(program), at=repository)
    (repository / "a.py").write_text("two\n")
    assert git_state()["git"]["dirty"]
    assert not (repository / "ran").exists()


def test_wandb_offline_goes_on_under_the_same_id(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    started(run, config_of("wandb"), 0, 0, [5.0, 4.0, 3.0, 2.0])
    started(run, config_of("wandb"), 2, 4, [20.0, 10.0, 0.0])
    id = json.loads((run.path / "trackers.json").read_text())["id"]
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))  # named by their seconds
    assert [file.stem for file in files] == [f"run-{id}"] * 2
    until = time.monotonic() + 60  # a run does not wait for its tracker for long, and a busy machine is slow
    while len(history(files[1])) < 1 and time.monotonic() < until:
        time.sleep(0.2)
    assert [[step for step, _ in history(file)] for file in files] == [[1, 2, 3, 4], [5]]
    assert history(files[0])[1][1]["train/loss"] == 4.0


def history(file):
    """Steps with their numbers, in a file of wandb: a header, then a log of records as LevelDB has it."""
    from wandb.proto import wandb_internal_pb2

    data, at, rows, pending = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the end of a block
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        pending, at = pending + data[at + 7 : at + 7 + size], at + 7 + size
        if kind not in (1, 4):  # whole, or its last part
            continue
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(pending)
        pending = b""
        if entry.HasField("history"):
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in entry.history.item
            }
            rows.append((values.pop("_step"), values))
    return rows


def test_trackio_goes_on_with_its_run(run, tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    started(run, config_of("trackio", project="cai-tests"), 0, 0, [5.0, 4.0, 3.0, 2.0])
    started(run, config_of("trackio", project="cai-tests"), 2, 4, [20.0, 10.0, 0.0])
    id = json.loads((run.path / "trackers.json").read_text())["id"]
    logs = SQLiteStorage.get_logs("cai-tests", f"run-{id}")
    assert [(entry["step"], entry["train/loss"]) for entry in logs if "train/loss" in entry] == [
        (1, 5.0),
        (2, 4.0),
        (3, 3.0),
        (4, 2.0),
        (5, 0.0),
    ]
