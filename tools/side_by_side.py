"""Commands side by side: two at a time, each one's output in one piece, and a table of what they took."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

AT_ONCE = 2
"""Commands at a time. Most tests wait for a rank or a compiler now and then, and leave a core idle when alone."""


@dataclass(frozen=True)
class Job:
    """A command with a name to show.

    Args:
        name: stands in the table.
        command: its words.
        environment: variables beside those of this process.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        name: of the job.
        code: its exit code.
        wall: seconds from start to end.
        cpu: seconds of user and system time, of its children too.
    """

    name: str
    code: int
    wall: float
    cpu: float


def run_job(job: Job, show: Callable[[str], None]) -> Outcome:
    """Run one job and show its output, whole, when it has ended."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            job.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(job.environment or {})},
        )
        _, status, usage = os.wait4(process.pid, 0)  # which tells what the children took, too
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    wall, cpu = time.monotonic() - began, usage.ru_utime + usage.ru_stime
    outcome = Outcome(job.name, process.returncode, wall, cpu)
    show(f"\n===== {job.name}\n{text.rstrip()}\n===== {row(outcome)}\n")
    return outcome


def row(outcome: Outcome) -> str:
    """One line of the table."""
    end = "passed" if outcome.code == 0 else f"FAILED with {outcome.code}"
    return f"{outcome.name:30} {outcome.wall / 60:5.1f} min  {outcome.cpu / 60:5.1f} CPU-min  {end}"


def run(jobs: Sequence[Job], show: Callable[[str], None] = lambda text: print(text, flush=True)) -> bool:
    """Run jobs in their order, `AT_ONCE` at a time; returns whether all passed. One that fails stops no other."""
    began, load = time.monotonic(), os.getloadavg()[0]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda job: run_job(job, show), jobs))
    total = f"{(time.monotonic() - began) / 60:.1f} min, {sum(o.cpu for o in outcomes) / 60:.1f} CPU-min"
    show("\n".join([*map(row, outcomes), f"together: {total}, load at the start {load:.1f}"]))
    return all(outcome.code == 0 for outcome in outcomes)
