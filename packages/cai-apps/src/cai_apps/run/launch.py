"""Starts ranks on this machine through torch's elastic agent, and reports the one that failed first."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cai_apps.run import loopback
from cai_mesh import errors
from cai_mesh.errors import CaiError

PRELOADED = [
    "torch",
    "transformers",
    "cai_apps.run.worker",
    "cai_apps.applications.language.task",
    "transformers.models.llama.modeling_llama",
]
"""Imported once by the process all ranks are forked from."""


FAILURE, USER_ERROR = 1, 2
"""Exit codes."""

GRACE_SECONDS = 1.0
"""How long a failed rank stays before it exits. A rank that only lost a peer so leaves after that peer, and
the agent, which reports the first exit it sees, names the rank where it began."""


class RankFailure(Exception):
    """A rank ended with an error that is not the user's to fix from the message alone."""


def gpus(wanted: str) -> int:
    """GPUs of this machine that a run with `train.device = wanted` may use."""
    import torch

    return torch.cuda.device_count() if wanted != "cpu" else 0


def device_memory() -> int | None:
    """Bytes of the smallest GPU of this machine; None without one."""
    import torch

    count = torch.cuda.device_count()
    return min((torch.cuda.get_device_properties(i).total_memory for i in range(count)), default=None)


def choose_device(wanted: str, ranks: int | None) -> tuple[str, int]:
    """Device type and number of ranks for a mesh of `ranks`; None: of all the machine's GPUs.

    Raises:
        MeshError: GPUs are asked for and there are too few.
    """
    available = gpus(wanted)
    if ranks is None:
        ranks = max(1, available)
    if available >= ranks:
        return "cuda", ranks
    if wanted == "cuda":
        raise errors.MeshError(
            "the mesh needs more GPUs than this machine has",
            got=f"{available} GPUs",
            expected=f"{ranks}",
            fix='lower the degrees, start on several machines with `cai run`, or set train.device = "cpu"',
        )
    return "cpu", ranks


def launch(function: Callable[..., Any], *arguments: Any, ranks: int, device: str) -> None:
    """Runs `function(*arguments)` in `ranks` processes of this machine; one rank runs in this process.

    Raises:
        CaiError: a rank raised one; the first in time is raised here again.
        RankFailure: a rank failed otherwise; its message has the rank and its traceback.
    """
    if ranks == 1:
        function(*arguments)
        return
    if device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    loopback.use_loopback()
    multiprocessing.set_forkserver_preload(PRELOADED)
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
    )
    with _failures_named():
        elastic_launch(config, _as_rank)(function, *arguments)


def run_launcher(options: argparse.Namespace) -> None:
    """Runs torch.distributed.run with its own parsed options.

    Raises:
        RankFailure: a rank failed; names it and, where it left one, has its traceback.
    """
    from torch.distributed.run import run

    loopback.confine(options)
    with _failures_named():
        run(options)


@contextmanager
def _failures_named() -> Iterator[None]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("torch.distributed.elastic", "torch.distributed.run", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they print tracebacks of their own
    try:
        yield
    except ChildFailedError as failed:
        raise _first_failure(failed) from None


def _as_rank(function: Callable[..., Any], *arguments: Any) -> None:
    try:
        function(*arguments)
    except CaiError:
        raise
    except Exception:
        time.sleep(GRACE_SECONDS)
        raise


def _first_failure(failed: Any) -> Exception:
    rank, failure = failed.get_first_failure()
    details = (failure.error_file_data or {}).get("message")
    if not isinstance(details, dict):
        return RankFailure(f"rank {rank} ended with exit code {failure.exitcode} and left no traceback")
    kind, _, text = details["message"].partition(": ")
    error = getattr(errors, kind, None)
    if isinstance(error, type) and issubclass(error, CaiError):
        return error(text)
    return RankFailure(
        f"rank {rank} failed: {details['message']}\n{details['extraInfo']['py_callstack'].rstrip()}"
    )
