"""Two jobs and one directory: one at a time, never mixed, and the dead are made way for."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from processes import constant, ended, full_beyond, held, killed_before, start

from cai_mesh import checkpoint
from cai_mesh.checkpoint import commit, lock
from cai_mesh.checkpoint.lock import Holder, Lock
from cai_mesh.errors import CheckpointError

ID = "0123456789abcdef" * 2
OTHER = "f" * 32
DAY = 86400.0
NAMELESS = 1
"""The change at which a killed save leaves an empty directory, which says nothing of its process, for an hour."""


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def hold(directory, text, at=None):
    """A lock that somebody else holds; `at` is the time of its last sign of life."""
    file = directory / commit.LOCK / OTHER
    file.parent.mkdir(parents=True)
    file.write_text(text if isinstance(text, str) else json.dumps(asdict(text)))
    if at is not None:
        os.utime(file, (at, at))
    return file


@pytest.fixture
def running():
    """A process of this machine that is there, but not ours."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
                               stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def quick(monkeypatch):
    """Signs of life come and are missed in fractions of a second."""
    monkeypatch.setattr(lock, "BEAT", 0.05)
    monkeypatch.setattr(lock, "PATIENCE", 0.4)


def near(pid):
    return replace(Holder.me(), pid=pid, started=lock._process(pid)[1], job="theirs", since="2026-01-01")


def far():
    return replace(Holder.me(), host="elsewhere", pid=77, job="SLURM_JOB_ID=12", since="2026-01-01")


def test_a_running_job_is_named_and_kept_out(tmp_path, running):
    checkpoint.save(tmp_path, constant(1), step=1)
    file = hold(tmp_path, near(running.pid))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path, constant(2), step=2)
    said = str(caught.value)
    for part in (socket.gethostname(), str(running.pid), "theirs", "2026-01-01", "fix:", "save.lock"):
        assert part in said, part
    assert file.exists(), "the lock of a living job was broken"
    assert names(tmp_path) == ["save.lock", "step-1"]
    running.kill()
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and nobody has asked how it ended
    checkpoint_of_zombie = checkpoint.save(tmp_path, constant(2), step=2).wait()
    assert held(checkpoint_of_zombie) == 2, "a killed process nobody has waited for holds the lock"


@pytest.mark.parametrize("who", ["dead", "reused", "rebooted", "far", "silent", "empty", "early", "late"])
def test_the_lock_of_the_dead_is_taken_over(who, tmp_path, running, quick):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    cases = {
        "dead": (near(dead.pid), None),
        "reused": (replace(near(running.pid), started="1"), None),
        "rebooted": (replace(near(running.pid), place="another kernel"), None),
        "far": (far(), None),
        "silent": ("", None),
        "empty": (None, None),
        "early": (far(), time.time() - DAY),
        "late": (far(), time.time() + DAY),
    }
    holder, at = cases[who]
    if holder is None:
        (tmp_path / commit.LOCK).mkdir()
    else:
        hold(tmp_path, holder, at)
    assert held(checkpoint.save(tmp_path, constant(1), step=1).wait()) == 1
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("skew", [-DAY, 0.0, DAY])
@pytest.mark.parametrize("text", ["", None])
def test_a_job_elsewhere_that_gives_signs_of_life_is_kept_out_whatever_the_clocks_say(
    skew, text, tmp_path, quick, monkeypatch
):
    monkeypatch.setattr(lock, "PATIENCE", 60.0)
    file = hold(tmp_path, far() if text is None else text, time.time() + skew)
    done = threading.Event()

    def beat():
        while not done.wait(0.05):
            os.utime(file, (time.time() + skew,) * 2)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="another job is saving"):
            checkpoint.save(tmp_path, constant(1), step=1)
    finally:
        done.set()
        thread.join()
    assert file.exists()


def test_a_holder_gives_signs_of_life_until_it_lets_go(tmp_path, quick):
    held_lock = Lock(tmp_path / "save.lock", ID)
    file = tmp_path / "save.lock" / ID
    first = file.stat().st_mtime_ns
    until = time.monotonic() + 10
    while file.stat().st_mtime_ns == first:
        assert time.monotonic() < until, "no sign of life"
        time.sleep(0.01)
    held_lock.release()
    held_lock.release()
    assert names(tmp_path) == []


def test_a_save_that_lost_its_lock_commits_nothing(tmp_path):
    checkpoint.save(tmp_path, constant(1), step=1)
    draft = commit.Draft(tmp_path, 2, ID)
    draft.begin(0)
    shutil.rmtree(tmp_path / commit.LOCK)
    theirs = hold(tmp_path, far())
    with pytest.raises(CheckpointError, match="not this save's any more"):
        draft.commit({}, None)
    draft.close()
    assert theirs.exists(), "another job's lock was let go of"
    assert names(tmp_path) == ["save.lock", "step-1"]


def test_a_lock_that_fails_while_it_is_taken_is_not_held(tmp_path, monkeypatch):
    def no_threads(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_threads)
        with pytest.raises(CheckpointError, match="can't start new thread"):
            checkpoint.save(tmp_path, constant(1), step=1)
    assert names(tmp_path) == []


def test_many_find_one_dead_lock_and_one_gets_it(tmp_path):
    """Every round: four processes break the same dead lock; each that takes it must be alone."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for i in range(10):
        hold(tmp_path, near(dead.pid))

        def take(turn, i=i):
            try:
                mine = Lock(tmp_path / commit.LOCK, f"{turn:032x}")
            except CheckpointError:
                return
            alone = tmp_path / f"alone-{i}"
            alone.mkdir()
            time.sleep(0.005)
            alone.rmdir()
            mine.release()

        assert [ended(pid) for pid in [start(lambda t=t: take(t)) for t in range(4)]] == [0] * 4
        assert names(tmp_path) == []


def test_two_jobs_in_one_directory_are_never_mixed(tmp_path, capfd):
    """Both save every step at once. Each loadable checkpoint is of one job; at least one job gets its step saved."""
    rounds = 20

    def job(value):
        for step in range(1, rounds + 1):
            (tmp_path / f"ready-{value}-{step}").touch()
            while not (tmp_path / f"ready-{3 - value}-{step}").exists():
                time.sleep(0)
            try:
                checkpoint.save(tmp_path / "saved", constant(value), step=step)
            except CheckpointError as error:
                if "exists" not in error.what and "another job" not in error.what:
                    raise

    assert [ended(pid) for pid in [start(lambda v=v: job(v)) for v in (1, 2)]] == [0, 0], capfd.readouterr()
    assert names(tmp_path / "saved") == sorted(f"step-{step}" for step in range(1, rounds + 1))
    assert {held(path) for path in checkpoint.steps(tmp_path / "saved")} <= {1.0, 2.0}


def test_a_save_killed_at_any_change_of_the_disk_leaves_nothing_that_matters(tmp_path):
    base = tmp_path / "base"
    for step in (1, 2):
        checkpoint.save(base, constant(step), step=step)
    (base / "step-3").mkdir()
    (base / "step-0.deleting").mkdir()
    change = 0
    while True:
        saved = tmp_path / f"killed-{change}"
        shutil.copytree(base, saved)

        def save(saved=saved, change=change):
            killed_before(change, saved)
            checkpoint.save(saved, constant(3), step=3, keep_last=2)

        code = ended(start(save))
        good = [path for path in checkpoint.steps(saved) if not commit.problems(path)]
        assert good[-1].name in ("step-2", "step-3"), change
        assert [held(path) for path in good] == [int(path.name[5:]) for path in good]
        checkpoint.save(saved, constant(4), step=4, keep_last=2)
        left = {name.partition(".")[0] if change == NAMELESS else name for name in names(saved)}
        left -= {"step-3.damaged-0", "save" if change == NAMELESS else ""}
        assert left - {"step-3"} <= {good[-1].name, "step-4"}, change
        shutil.rmtree(saved)
        if code == 0:
            break
        assert code == -9, change
        change += 1
    assert change > 20, "too few changes were heard of"


@pytest.mark.parametrize("room", [0, 100, 700, 1500, 2500, 3500])
def test_a_full_disk_at_any_file_is_told_and_leaves_nothing(room, tmp_path):
    checkpoint.save(tmp_path, constant(1), step=1)

    def save():
        full_beyond(room)
        with pytest.raises(CheckpointError, match="File too large"):
            checkpoint.save(tmp_path, constant(2), step=2)

    assert ended(start(save)) == 0
    assert names(tmp_path) == ["step-1"]
    assert held(tmp_path / "step-1") == 1
    checkpoint.save(tmp_path, constant(2), step=2)


def test_a_checkpoint_for_which_there_is_no_room_is_refused_before_it_is_written(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, constant(1), step=1)
    bytes_of_it = 4 * 64 * 4
    for free, fits in ((commit.BESIDE + bytes_of_it - 1, False), (commit.BESIDE + bytes_of_it, True)):
        usage = shutil._ntuple_diskusage(2**40, 2**40 - free, free)
        monkeypatch.setattr(commit.shutil, "disk_usage", lambda _, usage=usage: usage)
        if fits:
            checkpoint.save(tmp_path, constant(2), step=2)
        else:
            with pytest.raises(CheckpointError, match=r"(?s)no room for a checkpoint.*1\.0 MiB free"):
                checkpoint.save(tmp_path, constant(2), step=2)
            assert names(tmp_path) == ["step-1"]


def test_a_directory_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, constant(1), step=1)

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", read_only)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            checkpoint.save(tmp_path, constant(2), step=2)
        assert held(tmp_path) == 1, "loading needs to write"
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not write"):
        checkpoint.save(tmp_path / "file", constant(2), step=2)


def test_links_lead_to_one_lock_and_only_links_are_pruned(tmp_path, running):
    real, link = tmp_path / "real", tmp_path / "link"
    checkpoint.save(real, constant(1), step=1)
    link.symlink_to(real)
    (real / "step-1").rename(tmp_path / "elsewhere")
    (real / "step-1").symlink_to(tmp_path / "elsewhere")
    assert checkpoint.save(link, constant(2), step=2, keep_last=1).wait() == link / "step-2"
    assert names(real) == ["step-2"]
    assert held(tmp_path / "elsewhere") == 1, "what a link led to was deleted"
    hold(real, near(running.pid))
    with pytest.raises(CheckpointError, match="another job"):
        checkpoint.save(link, constant(3), step=3)


class Gate:
    """Keeps the next write waiting until it is opened."""

    def __init__(self, monkeypatch):
        from cai_mesh.checkpoint import saving

        write, self._first = saving._write, True
        self.reached, self.open = threading.Event(), threading.Event()

        def gated(*args):
            if self._first:
                self._first = False
                self.reached.set()
                assert self.open.wait(30)
            return write(*args)

        monkeypatch.setattr(saving, "_write", gated)


@pytest.mark.parametrize("first, second, left", [(3, 4, [3, 4]), (4, 3, [3, 4]), (3, 3, [2, 3])])
def test_saves_of_one_job_may_overlap_and_prune(first, second, left, tmp_path, monkeypatch):
    for step in (1, 2):
        checkpoint.save(tmp_path, constant(step), step=step)
    gate = Gate(monkeypatch)
    slow = checkpoint.save(tmp_path, constant(first), step=first, keep_last=2, async_=True)
    assert gate.reached.wait(30)
    checkpoint.save(tmp_path, constant(second), step=second, keep_last=2)
    assert ended(start(lambda: checkpoint.save(tmp_path, constant(9), step=9))) == 1, "another job was let in"
    gate.open.set()
    if first == second:
        with pytest.raises(CheckpointError, match="exists"):
            slow.wait()
    else:
        assert held(slow.wait()) == first
    assert names(tmp_path) == [f"step-{step}" for step in left]
    assert [held(path) for path in checkpoint.steps(tmp_path)] == left


def test_a_save_of_an_older_step_is_not_pruned_by_itself(tmp_path):
    for step in (10, 11):
        checkpoint.save(tmp_path, constant(step), step=step)
    assert held(checkpoint.save(tmp_path, constant(6), step=6, keep_last=2).wait()) == 6


def test_what_somebody_else_deletes_meanwhile_is_no_error(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, constant(step), step=step)
    found = commit.steps

    def deleted_since(directory):
        listed = found(directory)
        shutil.rmtree(tmp_path / "step-1", ignore_errors=True)
        return listed

    monkeypatch.setattr(commit, "steps", deleted_since)
    checkpoint.save(tmp_path, constant(4), step=4, keep_last=2)
    assert names(tmp_path) == ["step-3", "step-4"]


def test_what_cannot_be_pruned_is_told_and_the_save_stands(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, constant(1), step=1)
    rename = Path.rename

    def refused(self, target):
        if str(target).endswith(".deleting"):
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.warns(UserWarning, match="step-1 could not be deleted"):
        assert held(checkpoint.save(tmp_path, constant(2), step=2, keep_last=1).wait()) == 2


@pytest.mark.parametrize(
    "name", ["step-1.deleting", "step-1.tmp", f"step-1.{ID}.deleting", f"step-1.{ID}.tmp"]
)
def test_leftovers_are_never_listed_nor_loaded_and_the_next_save_removes_them(name, tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, constant(step), step=step)
    (tmp_path / "step-1").rename(tmp_path / name)
    assert checkpoint.steps(tmp_path) == [tmp_path / "step-2"]
    for use in (checkpoint.verify, held, checkpoint.contents):
        with pytest.raises(CheckpointError, match="not finished"):
            use(tmp_path / name)
    checkpoint.save(tmp_path, constant(1), step=1)
    checkpoint.save(tmp_path, constant(3), step=3, keep_last=2)
    assert names(tmp_path) == ["step-2", "step-3"]


@pytest.mark.parametrize("age, left", [(0.0, 1), (DAY, 0)])
@pytest.mark.parametrize("whose", ["dead", "far"])
def test_what_was_prepared_for_a_lock_and_never_used_is_removed(age, left, whose, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    file = hold(tmp_path, near(dead.pid) if whose == "dead" else far(), time.time() - age)
    file.parent.rename(tmp_path / f"{commit.LOCK}.{OTHER}")
    checkpoint.save(tmp_path, constant(1), step=1)
    assert len(names(tmp_path)) == 1 + (left if whose == "far" else 0)
