"""Starts ranks on this machine through torch's elastic agent, and reports the one that failed first."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from cai_apps.config.environment import LAUNCHER
from cai_apps.config.terminal import printable_output
from cai_apps.run.exit_codes import GRACE_SECONDS, STOPPED, USER_ERROR
from cai_apps.run.health.last_activity import DOING, RUN, last_done
from cai_apps.run.health.user_errors import user_error
from cai_apps.run.launch import loopback
from cai_mesh import errors
from cai_mesh.errors import CaiError

SAVE_SECONDS = 3600
"""How long ranks that were asked to stop have for the step they are in and a checkpoint."""


class RankFailure(Exception):
    """A rank ended with an error that is not the user's to fix from the message alone."""


def launch(
    function: Callable[..., Any], *arguments: Any, ranks: int, device: str, preload: Collection[str] = ()
) -> None:
    """Runs `function(*arguments)` in `ranks` processes of this machine; one rank runs in this process.

    Args:
        preload: modules that are imported once, by the process that all ranks are forked from.

    Raises:
        CaiError: a rank raised one; the first in time is raised here again.
        RankFailure: a rank failed otherwise; its message has the rank and its traceback.
        SystemExit: a signal, which goes on to the ranks, stopped them.
    """
    if ranks == 1:
        function(*arguments)
        return
    if device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    loopback.use_loopback()
    _start_fork_server(preload)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="cai",
        rdzv_backend=loopback.register(),
        rdzv_endpoint="127.0.0.1:0",
        start_method="forkserver",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGHUP,SIGQUIT",
        **_patience(LaunchConfig),
    )
    pids = multiprocessing.get_context("forkserver").RawArray("i", ranks)
    with _signals_to(pids) as signals, _failures_named(signals):
        elastic_launch(config, _as_rank)(os.getpid(), pids, function, *arguments)


def _start_fork_server(preload: Collection[str]) -> None:
    """Starts the process that ranks are forked from.

    Signals to all processes of a job, as schedulers and `timeout` send them, do not end it: it tells how ranks end.
    """
    multiprocessing.set_forkserver_preload(["torch", *preload])
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPED}  # which it inherits
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_launcher(options: argparse.Namespace) -> None:
    """Runs torch.distributed.run with its own parsed options.

    Raises:
        RankFailure: a rank failed; names it and, where it left one, has its traceback.
        SystemExit: a signal, which the agent passes on to the ranks, stopped them.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.launcher.api import LaunchConfig
    from torch.distributed.run import run

    loopback.confine(options)
    if getattr(options, "shutdown_timeout", None) is None:
        options.shutdown_timeout = SAVE_SECONDS
    if not _patience(LaunchConfig):
        PContext.close.__defaults__ = (None, SAVE_SECONDS)  # of this process, which is only the launcher
    with _failures_named([]):
        run(options)


def _patience(launch_config: type) -> dict[str, int]:
    """The time that ranks have to save after a signal, for a torch that lets it be said; older ones give 30 seconds."""
    key = "shutdown_timeout"
    return {key: SAVE_SECONDS} if key in launch_config.__dataclass_fields__ else {}


@contextmanager
def _signals_to(pids: Any) -> Iterator[list[int]]:
    """Passes SIGTERM and SIGINT on to the processes of `pids`; yields the list of those that came."""
    signals: list[int] = []

    def pass_on(number: int, _: object) -> None:
        signals.append(number)
        for pid in pids:
            with suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, number)

    before = {number: signal.signal(number, pass_on) for number in STOPPED}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _failures_named(signals: list[int]) -> Iterator[None]:
    """Turns what the agent raises into what this module raises; `signals` are the signals that the ranks were sent."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("torch.distributed.elastic", "torch.distributed.run", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they print tracebacks of their own
    try:
        yield
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as failed:
        raise _first_failure(failed, signals) from None


def _as_rank(launcher: int, pids: Any, function: Callable[..., Any], *arguments: Any) -> None:
    os.environ[LAUNCHER] = str(launcher)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until training begins there is nothing to lose
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pids[int(os.environ["LOCAL_RANK"])] = os.getpid()
    try:
        with printable_output():
            function(*arguments)
    except CaiError:
        raise
    except Exception as error:
        time.sleep(GRACE_SECONDS)
        cai_error = user_error(error)
        if cai_error is None:
            raise
        raise cai_error from error


def _first_failure(failed: Any, signals: list[int]) -> BaseException:
    rank, failure = next(iter(failed.failures.items()))  # in the order in which the agent saw them
    details = (failure.error_file_data or {}).get("message")
    if not isinstance(details, dict):
        if failure.exitcode in STOPPED.values():
            return SystemExit(failure.exitcode)
        if failure.exitcode == USER_ERROR:  # the rank has said why
            print(f"error: {_without_traceback(rank, failure)}", file=sys.stderr, flush=True)
            return SystemExit(USER_ERROR)
        if signals:
            doing = last_done(failure.error_file_data or {}) or "the start, before a step"
            print(f"stopped by {signal.Signals(signals[0]).name} in {doing}", flush=True)
            return SystemExit(STOPPED[signals[0]])
        return RankFailure(_without_traceback(rank, failure))
    kind, _, text = details["message"].partition(": ")
    error = getattr(errors, kind, None)
    if isinstance(error, type) and issubclass(error, CaiError):
        return error(text)
    stack = details["extraInfo"]["py_callstack"].rstrip()
    where = "" if stack == "NoneType: None" else f"\n{stack}"  # what was not raised has no traceback
    return RankFailure(f"rank {rank} failed: {details['message']}{where}")


def _without_traceback(rank: int, failure: Any) -> str:
    """What is known of a rank that left no traceback; written to its file in crash/ too."""
    code, data = failure.exitcode, failure.error_file_data or {}
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    if DOING in data:
        how += f" in {last_done(data)}"
    text = f"rank {rank} {how} and left no traceback"
    if code == -signal.SIGKILL:
        text += "\n  cause:    often the machine ran out of memory; the kernel's log (dmesg) tells"
    if RUN in data:
        with suppress(OSError):
            (Path(data[RUN]) / "crash" / f"rank-{rank}.txt").write_text(text + "\n", encoding="utf-8")
    return text
