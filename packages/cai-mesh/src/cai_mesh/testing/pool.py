"""Ranks for tests: a pool of processes that have torch imported, reused from test to test."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cai_mesh.testing.rank import Reply, Request, reference, serve

PRELOADED = ("torch", "torch.distributed", "torch.distributed.tensor", serve.__module__)
"""Modules that the process imports which ranks are forked from."""

GRACE_SECONDS = 2.0
"""Seconds that the other ranks may go on after one has failed, to bring their own errors."""


class RankError(RuntimeError):
    """One or more ranks failed or ran out of time. The message holds every rank's traceback."""


class RankPool:
    """Processes that run functions as gloo ranks. Started from a fork server, so torch is imported once.

    Attributes:
        processes: number of processes that were started.
        groups: number of groups of ranks that were started; each call makes one, but for those of a `RankGroup`.
    """

    def __init__(self) -> None:
        self.processes = self.groups = 0
        self._context = mp.get_context("forkserver")
        self._preloaded = dict.fromkeys(PRELOADED)
        self._workers: list[tuple[Any, Connection, Path]] = []
        self._kept: Path | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="cai-ranks-")

    def preload(self, *modules: str) -> None:
        """Have `modules` imported once, before ranks are forked, if no process of the pool runs yet."""
        self._preloaded |= dict.fromkeys(modules)

    def context(self) -> Any:
        """Return the context in which processes start: forked from one that has imported what is preloaded."""
        self._context.set_forkserver_preload(list(self._preloaded))  # is read when the first process starts
        return self._context

    def _grow(self, n: int) -> None:
        self.context()
        while len(self._workers) < n:
            ours, theirs = self._context.Pipe()
            dump = (
                Path(self._directory.name)
                / f"stacks-{os.getpid()}-{len(self._workers)}-{time.monotonic_ns()}"
            )
            process = self._context.Process(target=serve, args=(theirs, str(dump)), daemon=True)
            with no_main_module():
                process.start()
            theirs.close()
            self._workers.append((process, ours, dump))
            self.processes += 1

    def run(
        self,
        n: int,
        fn: Callable[..., Any],
        args: tuple,
        timeout: float,
        kwargs: dict[str, Any],
        group: RankGroup | None = None,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on ranks 0..n-1 and return the results in rank order.

        Args:
            n: number of ranks.
            fn: a function at the top level of a module.
            args: its positional arguments.
            timeout: seconds that it may take.
            kwargs: its keyword arguments.
            group: the group whose ranks they are; None for ranks of this call alone.
        """
        payload = pickle.dumps((_checked_reference(fn), pickle.dumps((args, kwargs))))
        if not all(process.is_alive() for process, _, _ in self._workers):
            self.close()
        self._grow(n)
        store = self._store_of(group)
        pipes = {self._workers[rank][1]: rank for rank in range(n)}
        try:
            for pipe, rank in pipes.items():
                pipe.send(Request(rank, n, str(store), group is not None, timeout, list(sys.path), payload))
            replies = self._collect(pipes, time.monotonic() + timeout)
        except BaseException:  # an interrupt: replies still under way would answer the next call
            self.close()
            raise
        if errors := {rank: reply.value for rank, reply in replies.items() if not reply.good}:
            self.close()
            raise RankError(_told(errors))
        sequences = {reply.sequence for reply in replies.values()}
        if None in sequences or len(sequences) > 1:  # a rank has begun what others have not
            self._kept = None
        return [replies[rank].value for rank in range(n)]

    def _store_of(self, group: RankGroup | None) -> Path:
        """The file in which ranks meet: that of the last call, if it was of the same group and left it usable."""
        if group is not None and group.store is not None and group.store == self._kept:
            return group.store
        self.groups += 1
        store = Path(self._directory.name) / f"store-{time.monotonic_ns()}"
        self._kept = None
        if group is not None:
            self._kept = group.store = store
        return store

    def _collect(self, pipes: dict[Connection, int], deadline: float) -> dict[int, Reply]:
        replies: dict[int, Reply] = {}
        waiting = dict(pipes)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    replies[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    replies[rank] = Reply(False, "the process died without a traceback")
                except Exception:
                    message = f"its result cannot be read here\n{traceback.format_exc()}"
                    replies[rank] = Reply(False, message)
                if not replies[rank].good:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in waiting.values():
            replies[rank] = Reply(False, "did not finish in time\n" + self._stacks(rank))
        return replies

    def _stacks(self, rank: int) -> str:
        process, _, dump = self._workers[rank]
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.2)
        return dump.read_text() if dump.exists() else ""

    def close(self) -> None:
        """Kill the processes; the next run starts new ones."""
        for process, pipe, _ in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers.clear()
        self._kept = None


def _told(errors: dict[int, str]) -> str:
    """The end of each rank, a line each, then all they said."""
    ends = [
        f"rank {rank} ended with: {text.strip().splitlines()[-1]}" for rank, text in sorted(errors.items())
    ]
    return "\n".join([*ends, *(f"rank {rank}: {text}" for rank, text in sorted(errors.items()))])


@contextlib.contextmanager
def no_main_module():
    """Keep a new process from importing this one's `__main__` again, which for pytest is all of pytest."""
    main = sys.modules["__main__"]
    kept = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(kept)


def _checked_reference(fn: Callable[..., Any]) -> tuple[str, str, str]:
    if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
        raise RankError(f"{fn.__qualname__} must be a function at the top level of a module")
    return reference(fn)


_POOLS: dict[int, RankPool] = {}


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 180.0, **kwargs: Any) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `n` gloo ranks of this machine; returns their results in rank order.

    `fn` is a function at the top level of a module; arguments and results must pickle. torch.distributed is
    initialized around it. Processes are kept for the next call. Raises `RankError` with every failing rank's
    traceback, or the stacks of ranks that did not finish within `timeout` seconds.
    """
    return _pool().run(n, fn, args, timeout, kwargs)


def preload(*modules: str) -> None:
    """Have modules imported once for all ranks of `run_ranks`, in the process that they are forked from.

    A rank otherwise imports by itself what its function needs: of transformers that is seconds, for each rank of each
    new group. Call it before the first `run_ranks`, as a suite's `conftest.py` does; modules named later have no
    effect. A module that cannot be imported there is passed over.
    """
    _pool().preload(*modules)


def preloaded_context() -> Any:
    """Return the context of processes that are forked from the one that the ranks of `run_ranks` are forked from."""
    return _pool().context()


def _pool() -> RankPool:
    if os.getpid() not in _POOLS:
        pool = _POOLS[os.getpid()] = RankPool()
        atexit.register(pool.close)
    return _POOLS[os.getpid()]


class RankGroup:
    """Ranks that run one case after another, as `run_ranks` does one, and stay initialized from case to case.

    No case finds what another has left: before each, seeds are set; after each, process groups that it made are
    destroyed, `ProcessState` is put back and garbage is collected. After a case that raises, hangs, dies, ends with
    ranks out of step or destroys the default process group, and where other ranks of this process have run in
    between, the next case has a fresh group.

    Args:
        n: number of ranks.
        timeout: seconds that each case may take.
        pool: the pool that its processes belong to; None for that of `run_ranks`.

    Attributes:
        store: the file in which its ranks have met.
    """

    def __init__(self, n: int, *, timeout: float = 180.0, pool: RankPool | None = None) -> None:
        self.n, self.timeout, self.pool = n, timeout, pool
        self.store: Path | None = None

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a case, `fn(*args, **kwargs)`, and return its results in rank order; raises as `run_ranks` does."""
        return (self.pool or _pool()).run(self.n, fn, args, self.timeout, kwargs, group=self)
