"""Ten kills over one run: its weights are bitwise those of a run that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from runs import LAUNCHERS, alive, command, output, ranks, same, started, steps, until

KILLS, STEPS, EVERY = 10, 300, 5
VICTIMS = ("launcher", "rank 0", "rank 1")


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_ten_kills_lose_nothing(tmp_path):
    draw = random.Random(int(os.environ.get("CAI_SOAK_SEED", "0")))
    options = {"train__steps": STEPS, "checkpoint__every": EVERY, "checkpoint__keep_last": 3}
    options |= {"lr_schedule__decay_steps": STEPS}
    whole, run, log = tmp_path / "whole", tmp_path / "run", []
    with started(command("cai train", whole, **options), whole) as process:
        assert process.wait(timeout=300) == 0, output(whole)
    for number in range(1, KILLS + 1):
        launcher, victim = draw.choice([*LAUNCHERS]), draw.choice(VICTIMS)
        log.append(
            f"kill {number}: {_killed(command(launcher, run, **options), run, launcher, victim, draw)}"
        )
    with started(command("cai train", run, **options), run) as process:
        assert process.wait(timeout=300) == 0, output(run)
    equal = same(run, whole)
    log.append(f"end: step {steps(run)}, weights {'bitwise equal' if equal else 'DIFFER'}")
    (Path(os.environ.get("CAI_SOAK_LOG", tmp_path / "soak.log"))).write_text("\n".join(log) + "\n")
    assert equal and steps(run) == STEPS, log


def _killed(words: list[str], run: Path, launcher: str, victim: str, draw: random.Random) -> str:
    """Go on with the run, kill one of its processes after some steps, and see that no rank stays; what was done."""
    with started(words, run) as process:
        until(lambda: f"/{STEPS} " in output(run) or process.poll() is not None)
        since = steps(run)
        goal = since + draw.randint(1, 3 * EVERY)
        until(lambda: goal <= steps(run) < STEPS or process.poll() is not None)
        pids = ranks(process)
        assert process.poll() is None and len(pids) == 2, output(run)
        os.kill(process.pid if victim == "launcher" else pids[int(victim[-1])], signal.SIGKILL)
        took = until(lambda: not alive(pids), 10)
        process.wait(timeout=20)
        reached = steps(run)
    begun = next((line for line in output(run).splitlines() if "resumed from" in line), "begun anew")
    return f"{victim} of `{launcher}` at step {reached}, {begun.rsplit('/')[-1]}; no rank left after {took:.1f} s"
