"""A run in which no step ends any more is ended, and the rank that the others wait for is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cai_apps.config.environment import HANG, hang_limit
from cai_apps.run.blame import Group, Seen, blame
from cai_apps.run.watchdog import FIRST, FLOOR
from cai_mesh.errors import ConfigError

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SMALL = {
    "train.steps": 2000, "train.global_batch": 4, "train.microbatch_size": 2, "train.validate_every": 0,
    "data.limit_bytes": 50_000, "data.sequence_length": 16, "log.sample_tokens": 0, "train.device": "cpu",
    "parallel.shard": 2, "parallel.tensor.size": 1, "parallel.pipeline.size": 1,
}  # fmt: skip


def hang(directory: Path, how: str, ranks: int) -> tuple[str, float]:
    """What a launcher prints whose ranks hang; seconds."""
    started = time.monotonic()
    command = [sys.executable, "-m", "cai_apps", "run", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("hanging.py")), str(directory), how],
        capture_output=True, text=True, timeout=120, env=ENVIRONMENT | {HANG: "3"}, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr, time.monotonic() - started


def test_a_rank_that_sleeps_is_named_with_the_collective_and_its_line(tmp_path):
    told, seconds = hang(tmp_path, "sleeps", 3)
    assert re.search(
        r"rank 1 has not arrived at all_reduce \[4\], number \d of ranks 0, 1(, 2)?, where rank [02] waits: "
        r"after step 3 it is in main at .*hanging.py:\d+: time.sleep\(600\)",
        told,
    ), told
    assert "rank 0 has not arrived" not in told  # it waits for rank 1
    assert seconds < 40
    assert "time.sleep(600)" in (tmp_path / "crash/rank-1.txt").read_text()
    assert "all_reduce" in (tmp_path / "crash/rank-0.txt").read_text()


def test_different_collectives_are_told(tmp_path):
    told, _ = hang(tmp_path, "differs", 2)
    assert "rank 0 has not arrived at broadcast [4]" in told, told
    assert "rank 1 has not arrived at all_reduce [4]" in told, told


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_a_stage_is_named_with_its_action(how, tmp_path):
    command = [sys.executable, "-m", "cai_apps", "run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("dying.py")), str(tmp_path), how],
        capture_output=True, text=True, timeout=150, env=ENVIRONMENT | {HANG: "30"}, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    what = "the backward of microbatch 2 on stage 1 (1B2)"
    crash = (tmp_path / "run/crash/rank-1.txt").read_text()
    if how == "dies":
        assert "rank 1 was killed by SIGKILL in step 3 (since" in done.stderr, done.stderr
        assert f", at {what} and left no traceback" in done.stderr, done.stderr
        assert what in crash
    else:
        assert f"rank 1: after step 2 it is at {what}, in fatal at" in done.stderr, done.stderr
        assert f"after step 2 it is at {what}" in crash


@pytest.mark.matrix
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_rank_that_is_stopped(goes_on, tmp_path):
    flags = [f"--{key}={value}" for key, value in SMALL.items()]
    more = [
        "--log.directory",
        str(tmp_path / "run"),
        "--data.cache",
        str(tmp_path / "cache"),
        "--log.every",
        "1",
    ]
    limit = {HANG: "60" if goes_on else "4"}
    cai = [sys.executable, "-m", "cai_apps"]
    command = [*cai, "run", "--nproc-per-node", "2", "-m", "cai_apps", "train", "llama-tiny", *flags, *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT | limit
    ) as train:
        try:
            metrics = tmp_path / "run/metrics.jsonl"
            steps(metrics, at_least=3, seconds=90)
            victim = rank_of(train.pid, 1)
            os.kill(victim, signal.SIGSTOP)
            if goes_on:
                time.sleep(3)
                before = steps(metrics, at_least=1, seconds=1)
                os.kill(victim, signal.SIGCONT)
                steps(metrics, at_least=before + 3, seconds=30)
                return
            wait_for(tmp_path / "run/crash/rank-0.txt", seconds=60)
            os.kill(victim, signal.SIGCONT)  # the launcher would wait half a minute before it kills
            _, told = train.communicate(timeout=60)
            assert train.returncode == 1
            assert "rank 1: no sign of life" in told, told
        finally:
            train.kill()


def steps(metrics: Path, *, at_least: int, seconds: float) -> int:
    """The steps done, once there are so many."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if found >= at_least:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {at_least} steps in {seconds} s")


def wait_for(file: Path, *, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not (file.exists() and file.stat().st_size):
        assert time.monotonic() < until, f"no {file} in {seconds} s"
        time.sleep(0.05)


def rank_of(launcher: int, rank: int) -> int:
    """Process id of a rank below a launcher."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and launcher in ancestors(int(process.name)):
            environment = (process / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment:
                return int(process.name)
    raise AssertionError(f"no rank {rank}")


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return found
        found.append(pid)
    return found


def seen(where="sleep", *, waits=False, **groups):
    return Seen(5, where, waits, {name: Group(*group) for name, group in groups.items()})


def test_who_is_blamed():
    world, pair = (0, 1, 2), (0, 1)
    ahead = seen(waits=True, w=(world, 7, "all_reduce [4]"), p=(pair, 3, "all_gather [2]"))
    behind = seen("sleep at x.py:1", w=(world, 7, "all_reduce [4]"), p=(pair, 2, "all_gather [2]"))
    third = seen(waits=True, w=(world, 8, "all_reduce [4]"))
    told = blame([ahead, behind, third])
    where = "rank 1 has not arrived at all_gather [2], number 3 of ranks 0, 1, where rank 0 waits"
    assert told == f"{where}: after step 5 it is in sleep at x.py:1"  # not rank 0, which waits for it
    assert blame([ahead, None, third]) == "rank 1: no sign of life; stopped, or the machine is gone"
    apart = [
        seen(waits=True, w=(world, 7, f"{name} [4]")) for name in ("all_reduce", "broadcast", "all_reduce")
    ]
    assert blame(apart).startswith(
        "the ranks have called different collectives: rank 0 all_reduce [4], rank 1 bro"
    )
    nothing = [seen(waits=True), seen("sleep at x.py:1"), seen(waits=True)]
    assert blame(nothing) == "rank 1: after step 5 it is in sleep at x.py:1"


def test_limits(monkeypatch):
    assert hang_limit({}) is None and hang_limit({HANG: "7.5"}) == 7.5 and hang_limit({HANG: "0"}) == 0
    for wrong in ("soon", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match=HANG):
            hang_limit({HANG: wrong})
    assert FLOOR < FIRST
