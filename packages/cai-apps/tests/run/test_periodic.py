"""Checkpoints by the clock: when they are due, where they are written, and what a disk without room does to them."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cai_apps import recipes
from cai_apps.applications.language.config import Config
from cai_apps.config.sections import Checkpoint
from cai_apps.run.files import checkpoint, room
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.origin import Origin
from cai_apps.run.files.position import Position
from cai_mesh import checkpoint as files
from cai_mesh.checkpoint import saving

LAST = 9
CONFIG = Config()


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def clock(monkeypatch):
    """Minutes that pass when they are added."""
    now = SimpleNamespace(minutes=100.0)
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: 60 * now.minutes)
    return now


def saver_of(directory, **options: Any) -> checkpoint.Saver:
    config = replace(CONFIG, checkpoint=Checkpoint(**options), train=replace(CONFIG.train, steps=LAST))
    (directory / "checkpoints").mkdir()
    session: Any = SimpleNamespace(config=config, state=lambda: {"model.a": torch.ones(4, 3)})
    return checkpoint.Saver(session, RunDirectory(directory), Origin({}, "tokens", ""))


def stepped(saver: checkpoint.Saver, step: int) -> None:
    """Do what a run does after a step."""
    position = Position(step, step, step)
    if checkpoint.is_due(saver._session.config, position, by_clock=saver.by_clock()):
        saver.save(position, required=step == LAST)


def names(directory) -> list[str]:
    return [path.name for path in files.steps(directory / "checkpoints")]


def test_fifteen_minutes_and_two_kept_are_the_default(tmp_path, clock):
    saver = saver_of(tmp_path)
    for step in range(1, LAST + 1):
        clock.minutes += 8  # every second step is after 15 minutes
        stepped(saver, step)
        saver.wait()
        assert (saver.step == step) is (step % 2 == 0 or step == LAST)
    assert names(tmp_path) == ["step-8", "step-9"]


def test_a_run_of_minutes_saves_its_end_alone(tmp_path, clock):
    saver = saver_of(tmp_path)
    for step in range(1, LAST + 1):
        clock.minutes += 1.5
        stepped(saver, step)
    assert names(tmp_path) == ["step-9"]
    assert saver._group is None, "nothing is made for saves that do not come"


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"minutes": 0.0}, ["step-9"]),
        ({"minutes": 0.0, "final": False}, []),
        ({"minutes": 1.0, "final": False}, ["step-7", "step-8"]),
        ({"minutes": 1.0, "keep_last": None}, [f"step-{step}" for step in range(1, LAST + 1)]),
        ({"minutes": 1.0, "keep_last": 1}, ["step-8", "step-9"]),
        ({"minutes": 0.0, "every": 4}, ["step-8", "step-9"]),
        ({"minutes": 20.0, "every": 4}, ["step-8", "step-9"]),  # a save by steps sets the clock, too
    ],
)
def test_by_time_by_steps_or_not_at_all(options, saved, tmp_path, clock):
    saver = saver_of(tmp_path, **options)
    for step in range(1, LAST + 1):
        clock.minutes += 3
        stepped(saver, step)
    saver.wait()
    assert names(tmp_path) == saved


def test_a_step_that_was_left_out_is_not_saved_by_the_clock():
    position = Position(3, 3, 3)
    assert checkpoint.is_due(CONFIG, position, by_clock=True)
    assert not checkpoint.is_due(CONFIG, position, by_clock=True, left_out=True)


@pytest.mark.parametrize(
    ("background", "free", "apart"),
    [("auto", 2**40, True), ("auto", 90, False), ("off", 2**40, False), ("on", 90, True)],
)
def test_in_the_background_where_memory_holds_a_copy(background, free, apart, tmp_path, clock, monkeypatch):
    monkeypatch.setattr(room, "free_memory", lambda: free)
    threads = []
    save = saving._write

    def write(*args):
        threads.append(threading.current_thread() is not threading.main_thread())
        return save(*args)

    monkeypatch.setattr(saving, "_write", write)
    saver = saver_of(tmp_path, minutes=1.0, background=background)
    for step in (1, LAST):
        clock.minutes += 1
        stepped(saver, step)
        saver.wait()
    assert threads == [apart, False], "the last one is waited for anyway"


def test_a_disk_without_room_says_so_once(tmp_path, clock, capsys, monkeypatch):
    """Then there is room, and none again."""
    free = {"bytes": 0}
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: SimpleNamespace(free=free["bytes"]))
    saver = saver_of(tmp_path, minutes=1.0)
    lines = []
    for step, size in ((1, 0), (2, 0), (3, 2**40), (4, 0), (5, 0)):
        free["bytes"] = size
        clock.minutes += 1
        stepped(saver, step)
        lines.append(capsys.readouterr().out)
    saver.wait()
    assert [line.count("\n") for line in lines] == [1, 0, 0, 1, 0]
    assert "no checkpoint after step 1: 0.00 GiB free, a checkpoint is" in lines[0]
    assert names(tmp_path) == ["step-3"]


def test_memory_that_a_container_may_take(tmp_path, monkeypatch):
    """What it holds of files that nobody reads is free, too."""
    monkeypatch.setattr(room, "CONTAINER", str(tmp_path))
    unlimited = room.free_memory()
    assert unlimited > 0
    (tmp_path / "memory.max").write_text("max\n")
    assert room.free_memory() > unlimited // 2
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 200\nactive_file 100\n")
    assert room.free_memory() == 500


@pytest.mark.parametrize("name", recipes.names())
def test_recipes_save_by_time(name):
    options = getattr(recipes.load(name), "checkpoint", Checkpoint())  # that of tables saves none
    assert options.minutes == 15
    assert options.keep_last >= 2
