"""Launchers and ranks that are killed: nobody stays behind, and the message names the rank where it began."""

from __future__ import annotations

import os
import signal

import pytest
from runs import LONGER, alive, command, ended, output, ranks, same, started, steps, until


@pytest.mark.parametrize("launcher", ["cai train", pytest.param("torchrun", marks=pytest.mark.matrix)])
def test_no_rank_outlives_its_launcher(launcher, device, tmp_path):
    run = tmp_path / "run"
    with started(command(launcher, run, device), run) as process:
        until(lambda: steps(run) >= 2 or process.poll() is not None)
        pids = ranks(process)
        assert alive(pids) == pids and len(pids) == 2
        process.kill()
        until(lambda: not alive(pids), 20)
    told = [(run / "crash" / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
    lines = [f"rank {rank} ended itself: its launcher is gone\n" for rank in (0, 1)]
    if launcher == "cai train":
        assert told == lines
    else:  # the store was torchrun's own: a rank that was asking it has a traceback instead
        assert told[0] == lines[0] or told[1] == lines[1], told


@pytest.mark.parametrize("launcher", ["cai train", pytest.param("cai run", marks=pytest.mark.matrix)])
def test_killed_rank_is_named_with_its_signal_and_step(launcher, device, tmp_path):
    run = tmp_path / "run"
    copies = "auto" if launcher == "cai train" else "off"  # on GPUs: ranks wait for copies, and in NCCL alone
    with started(command(launcher, run, device, parallel__copy_engines=copies), run) as process:
        until(lambda: steps(run) >= 2 or process.poll() is not None)
        pids = ranks(process)
        os.kill(pids[1], signal.SIGKILL)
        assert process.wait(timeout=45) == 1
        assert not alive(pids)
    last = steps(run)
    words = f"rank 1 was killed by SIGKILL in step {last + 1} (since "
    told = (run / "crash" / "rank-1.txt").read_text()
    assert any(words.replace(f"step {last + 1}", f"step {last + late}") in told for late in (0, 1, 2)), told
    assert f"error: {told.splitlines()[0]}" in output(run)
    assert "loss of the step before" in told
    assert "Traceback" not in output(run)


@pytest.mark.matrix
def test_ranks_that_are_started_again_end_with_the_same_weights(device, tmp_path):
    whole, run, every = tmp_path / "whole", tmp_path / "run", 5 * LONGER[device]
    options = {"train__steps": 8 * every, "checkpoint__every": every, "checkpoint__final": "False"}
    assert ended(command("cai train", whole, device, **options), whole, 90) == 0
    words = command("cai run", run, device, **options)
    words[4:4] = ["--max-restarts", "2"]
    with started(words, run) as process:
        until(lambda: (run / "checkpoints" / f"step-{every}" / "manifest.json").is_file())
        os.kill(ranks(process)[1], signal.SIGKILL)
        assert process.wait(timeout=120) == 0, output(run)
    again = "ranks were started again (1 of at most 2 times): going on from the newest checkpoint"
    assert output(run).count(again) == 1
    assert "resumed from" in output(run)
    assert steps(run) == 8 * every
    assert same(run, whole)
