"""Programs for tests: scripts and modules run as processes that are forked where torch is imported already."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from cai_mesh.testing.pool import no_main_module, preloaded_context


@dataclass(frozen=True)
class Ended:
    """A program that has ended.

    Args:
        returncode: its exit code, negative for a signal.
        stdout: the text of its standard output.
        stderr: the text of its standard error.
    """

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Start:
    """What a process needs to become a program.

    Args:
        words: as after `python`: a script and its arguments, or "-m", a module and its arguments.
        environment: all variables of its environment.
        folder: its working directory.
        server: the address of the process that its own ranks are forked from.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    server: str


def environments_of_ranks(ranks: int) -> list[dict[str, str]]:
    """Return what torchrun puts into the environments of `ranks` ranks of this machine."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    shared |= {"TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def run_programs(
    words: Sequence[str],
    environments: Sequence[Mapping[str, str]] = ({},),
    *,
    folder: str | Path = ".",
    timeout: float = 200.0,
) -> list[Ended]:
    """Run a program once for each environment, all at a time, and return how they ended, in that order.

    They are forked from the process that the ranks of `run_ranks` are forked from, which has imported torch and what
    `preload` names; so are ranks that they start by a fork server. Python's own options cannot be given, and what an
    import would read of the environment has been read.

    Args:
        words: as after `python`: a script and its arguments, or "-m", a module and its arguments.
        environments: variables beside those of this process, for each process.
        folder: the working directory.
        timeout: seconds after which all are killed.

    Raises:
        TimeoutError: one has not ended in time; has what it printed.
    """
    context = preloaded_context()
    forkserver.ensure_running()
    server = str(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="cai-program-") as place:
        processes, outputs = [], []
        for number, more in enumerate(environments):
            output = tuple(str(Path(place) / f"{number}.{kind}") for kind in ("out", "err"))
            start = Start(
                tuple(map(str, words)), os.environ | dict(more), str(Path(folder).resolve()), server
            )
            process = context.Process(target=_become, args=(start, *output))
            with no_main_module():
                process.start()
            processes.append(process)
            outputs.append(output)
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            ended = [
                Ended(process.exitcode, *(_text(file) for file in output))
                for process, output in zip(processes, outputs, strict=True)
                if process.exitcode is not None
            ]
            if len(ended) < len(processes):
                said = "\n".join(_text(file) for output in outputs for file in output)
                raise TimeoutError(f"{' '.join(map(str, words))} has not ended after {timeout:g} s\n{said}")
            return ended
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                process.join()


def _text(file: str) -> str:
    return Path(file).read_text(errors="replace") if Path(file).exists() else ""


def _become(start: Start, out: str, err: str) -> None:
    """Run a program in this process, as `python WORDS` does, and end it."""
    os.setsid()
    _attach(start.environment, start.folder, out, err)
    _reuse(start.server, out, err)
    code = _code_of(start.words)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _attach(environment: Mapping[str, str], folder: str, out: str, err: str) -> None:
    """Give this process an environment, a working directory, no input and two files to print to."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def _code_of(words: tuple[str, ...]) -> int:
    """Run a script or a module as the main program; return its exit code."""
    try:
        if words[0] == "-m":
            sys.argv = ["-m", *words[2:]]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _reuse(address: str, out: str, err: str) -> None:
    """Fork processes of the method "forkserver" from the server at an address, and let them print to two files."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    server.ensure_running = forkserver.ensure_running = lambda: None
    kind: Any = mp.context.ForkServerProcess
    begin = kind.start

    def start(process: Any) -> None:
        place = (dict(os.environ), os.getcwd(), out, err)  # which it would have of a server of its own
        process._target, process._args = _as_child, (*place, process._target, process._args)
        begin(process)

    kind.start = start


def _as_child(
    environment: Mapping[str, str],
    folder: str,
    out: str,
    err: str,
    target: Callable[..., None],
    arguments: tuple,
    **more: Any,
) -> None:
    _attach(environment, folder, out, err)
    target(*arguments, **more)
