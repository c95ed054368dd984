"""SIGTERM and SIGINT: all ranks stop after the same step, with a checkpoint, and the run goes on from there."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from runs import LONGER, alive, command, ended, output, ranks, same, started, steps, until

CASES = {
    "one rank": ("cai train", 1, signal.SIGTERM, "launcher"),
    "launcher": ("cai train", 2, signal.SIGTERM, "launcher"),
    "rank 1": ("cai train", 2, signal.SIGINT, "rank"),
    "terminal": ("cai train", 2, signal.SIGINT, "all"),
    "scheduler": ("cai train", 2, signal.SIGTERM, "all, in a step of a second"),
    "scheduler, cai run": ("cai run", 2, signal.SIGTERM, "all, in a step of a second"),
    "cai run": ("cai run", 2, signal.SIGTERM, "launcher"),
    "torchrun": ("torchrun", 2, signal.SIGTERM, "launcher"),
}


def send(process, number, whom):
    if whom == "all":
        os.killpg(process.pid, number)
    elif whom.startswith("all"):
        slow = ranks(process)[1]
        os.kill(slow, signal.SIGSTOP)
        os.killpg(process.pid, number)
        time.sleep(1)
        os.kill(slow, signal.SIGCONT)
    else:
        os.kill(ranks(process)[1] if whom == "rank" else process.pid, number)


IN_THE_SUITE = {"one rank", "terminal", "scheduler"}
"""Each of the others is a run of its own too, and asked for with `-m matrix`."""


def cases():
    return [pytest.param(case, marks=() if case in IN_THE_SUITE else pytest.mark.matrix) for case in CASES]


@pytest.mark.parametrize("case", cases())
def test_run_stops_after_a_step_with_a_checkpoint(case, device, tmp_path):
    launcher, size, number, whom = CASES[case]
    run = tmp_path / "run"
    with started(command(launcher, run, device, parallel__shard=size), run) as process:
        until(lambda: steps(run) >= 2 or process.poll() is not None)
        send(process, number, whom)
        code = process.wait(timeout=90)
    said = re.findall(r"^stopped by (\w+) after step (\d+) of 100000; go on with (.*)$", output(run), re.M)
    assert [(name, flags) for name, _, flags in said] == [(number.name, f"--log.directory {run}")], output(
        run
    )
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{said[0][1]}"]
    assert steps(run) == int(said[0][1])
    assert not list((run / "crash").iterdir())
    if launcher != "torchrun":  # which ends with its own traceback and 1
        assert code == 128 + number
        assert "Traceback" not in output(run)


HELPER = """
import errno
import os
import subprocess
from cai_apps.run.loop.training_loop import Loop

step = Loop._step


def slow(self, position, *arguments):
    if position.step == 2:
        helper = subprocess.Popen(["sleep", "60"])
        print("waits for a helper", flush=True)
        if code := helper.wait():
            if "FULL" in os.environ:
                raise OSError(errno.ENOSPC, "No space left on device")
            raise subprocess.CalledProcessError(code, helper.args)
    return step(self, position, *arguments)


Loop._step = slow
"""


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_that_ends_a_helper_too_is_told_as_what_it_is(size, tmp_path):
    """As a scheduler's reaches the compilers that a step waits for."""
    run = tmp_path / "run"
    (tmp_path / "sitecustomize.py").write_text(HELPER)
    words = command("cai train", run, "cpu", parallel__shard=size, checkpoint__every=1)
    with started(words, run, PYTHONPATH=str(tmp_path)) as process:
        until(lambda: output(run).count("waits for a helper") == size or process.poll() is not None)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=90) == 143, output(run)
    told = re.findall(
        r"^rank (\d) was stopped by SIGTERM in step 3.*which failed: \w+, see (\S+);", output(run), re.M
    )
    assert told and all(file == f"{run}/crash/rank-{rank}.txt" for rank, file in told), output(run)
    assert "sleep" in (run / "crash" / f"rank-{told[0][0]}.txt").read_text()
    assert "should not have happened" not in output(run) and "Traceback" not in output(run)
    assert steps(run) == 2 and (run / "checkpoints" / "step-2").is_dir()


def test_what_the_user_can_mend_is_told_after_a_signal_too(tmp_path):
    run = tmp_path / "run"
    (tmp_path / "sitecustomize.py").write_text(HELPER)
    with started(
        command("cai train", run, parallel__shard=1), run, PYTHONPATH=str(tmp_path), FULL="1"
    ) as process:
        until(lambda: "waits for a helper" in output(run) or process.poll() is not None)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=90) == 2, output(run)
    assert "error: No space left on device" in output(run) and "was stopped" not in output(run)


@pytest.mark.matrix
def test_what_was_stopped_goes_on_to_the_same_weights(device, tmp_path):
    whole, run, goal = tmp_path / "whole", tmp_path / "run", 60 * LONGER[device]
    assert ended(command("cai train", whole, device, train__steps=goal), whole, 90) == 0
    words = command("cai train", run, device, train__steps=goal)
    with started(words, run) as process:
        until(lambda: steps(run) >= 2)
        process.terminate()
        assert process.wait(timeout=90) == 143
    assert steps(run) < goal
    assert ended(words, run, 90) == 0
    assert "resumed from" in output(run)
    assert steps(run) == goal
    assert same(run, whole)


@pytest.mark.matrix
def test_second_interrupt_ends_at_once(device, tmp_path):
    """A rank that does not answer keeps the step from its end; the second SIGINT does not wait for it."""
    run = tmp_path / "run"
    with started(command("cai train", run, device), run) as process:
        until(lambda: steps(run) >= 2)
        pids = ranks(process)
        os.kill(pids[1], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(2)
        assert alive(pids) == pids
        process.send_signal(signal.SIGINT)
        until(lambda: pids[0] not in alive(pids), 3 if device == "cpu" else 10)
        os.kill(pids[1], signal.SIGCONT)
        assert process.wait(timeout=20) == 130, output(run)
        until(lambda: not alive(pids), 3)
