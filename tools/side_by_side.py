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
        cpu: seconds of user and system time of it and of the processes it waits for; ranks, which are forked from a
            server, are not among them.
    """

    name: str
    code: int
    wall: float
    cpu: float


def busy_seconds() -> float:
    """Return the seconds that the machine's cores have worked since it started, for whomever; 0 where nobody tells."""
    try:
        with open("/proc/stat") as file:
            user, nice, system = map(int, file.readline().split()[1:4])
    except OSError:
        return 0.0
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def run_job(job: Job, show: Callable[[str], None]) -> Outcome:
    """Run one job and show its output, whole, when it has ended."""
    began = time.monotonic()
    show(f"===== {job.name} begins")
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            job.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(job.environment or {})},
        )
        _, status, usage = os.wait4(process.pid, 0)
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
    began, busy, load = time.monotonic(), busy_seconds(), os.getloadavg()[0]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda job: run_job(job, show), jobs))
    minutes = f"{(time.monotonic() - began) / 60:.1f} min"
    cores = f"{(busy_seconds() - busy) / 60:.1f} CPU-min of the machine"
    show("\n".join([*map(row, outcomes), f"together: {minutes}, {cores}, load at the start {load:.1f}"]))
    return all(outcome.code == 0 for outcome in outcomes)
