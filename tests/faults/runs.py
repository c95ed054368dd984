"""Starts small runs as processes, on CPUs or on GPUs, finds their ranks, and reads what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

CAI = [sys.executable, "-m", "cai_apps"]
LAUNCHERS = {
    "cai train": [*CAI, "train"],
    "cai run": [*CAI, "run", "--nproc-per-node", "2", "train"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"),
        *("cai_apps", "train"),
    ],
}
SMALL = {
    "data.limit_bytes": 20_000,
    "data.sequence_length": 8,
    "train.global_batch": 2,
    "train.microbatch_size": 1,
    "train.validate_every": 0,
    "lr_schedule.decay_steps": 50,
    "log.every": 1,
    "log.sample_tokens": 0,
    "parallel.tensor.size": 1,
    "parallel.pipeline.size": 1,
}
DEVICES = {
    "cpu": {"train.device": "cpu"},
    "cuda": {
        "train.device": "cuda",
        "train.compile": "off",
        "train.kernels": "off",
    },  # which take long to start
}
LONGER = {"cpu": 1, "cuda": 10}
"""How many times the steps of a run on CPUs another takes that is to last as long."""


def command(launcher: str, run: Path, device: str = "cpu", **values: object) -> list[str]:
    """The command line of a run of llama-tiny in the directory `run`, on two ranks unless `values` say otherwise."""
    options = {**SMALL, **DEVICES[device], "parallel.shard": 2, "train.steps": 100_000, "log.directory": run}
    options |= {"data.cache": run.parent / "cache"}
    options |= {name.replace("__", "."): value for name, value in values.items()}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [*LAUNCHERS[launcher], "llama-tiny", *flags]


@contextlib.contextmanager
def started(words: list[str], run: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a session of its own, of which nothing is left at the end. `more` is for its environment."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more
    run.parent.mkdir(exist_ok=True)
    with _file(run, "out").open("w") as out, _file(run, "err").open("w") as err:
        process = subprocess.Popen(words, stdout=out, stderr=err, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        for pid in [process.pid, *_below(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ended(words: list[str], run: Path, seconds: float, **more: str) -> int:
    """The exit code of a run that is left to itself."""
    with started(words, run, **more) as process:
        return process.wait(timeout=seconds)


def _file(run: Path, kind: str) -> Path:
    return run.parent / f"{run.name}.{kind}"


def output(run: Path) -> str:
    """What was printed, that of stderr last."""
    return _file(run, "out").read_text() + errors(run)


def errors(run: Path) -> str:
    """What was printed to stderr."""
    return _file(run, "err").read_text()


def steps(run: Path) -> int:
    """Steps that the run has recorded."""
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.is_file() else 0


def until(true: Callable[[], object], seconds: float = 150) -> float:
    """Waits for a condition; returns how long it took."""
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < seconds, "it did not come about"
        time.sleep(0.05)
    return time.monotonic() - start


def ranks(process: subprocess.Popen[str]) -> list[int]:
    """The processes of a run's ranks, in the order of ranks."""
    if process.args[3] != "run" and process.args[2] != "torch.distributed.run":  # type: ignore[index]
        return _forked(process.pid)
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        if _parent(pid) != process.pid:  # a session of its own for each rank
            continue
        for line in _read(pid, "environ").split("\0"):
            if line.startswith("RANK="):
                found[int(line[5:])] = pid
    return [found[rank] for rank in sorted(found)]


def _forked(leader: int) -> list[int]:
    """Ranks that `cai train` started: what its fork server forked, in that order."""
    servers = [pid for pid in _session(leader) if "forkserver" in _read(pid, "cmdline")]
    return sorted(pid for pid in servers if _parent(pid) in servers)


def _session(leader: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) == leader:
                found.append(int(path.name))
    return found


def _below(ancestor: int) -> list[int]:
    """All processes that a process has started, and those that these have."""
    found, parents = (
        [ancestor],
        {int(path.name): _parent(int(path.name)) for path in Path("/proc").glob("[0-9]*")},
    )
    for above in found:
        found += [pid for pid, parent in parents.items() if parent == above]
    return found[1:]


def _read(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text()
    return ""


def _parent(pid: int) -> int:
    return int((_read(pid, "stat").rpartition(")")[2].split() or ["", "0"])[1])


def alive(pids: list[int]) -> list[int]:
    """Those that still run."""
    return [pid for pid in pids if (_read(pid, "stat").rpartition(")")[2].split() or ["X"])[0] not in "ZX"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """What the run exported."""
    from safetensors.torch import load_file

    return load_file(run / "export" / "model.safetensors")


def same(run: Path, other: Path) -> bool:
    """Whether two runs exported the same bits."""
    ours, theirs = weights(run), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
