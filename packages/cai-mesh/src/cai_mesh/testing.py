"""Ranks for tests: a pool of processes that have torch imported, reused from test to test."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import io
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

GRACE_SECONDS = 2.0
"""How long the other ranks may go on after one has failed, to bring their own errors."""


class RankError(RuntimeError):
    """One or more ranks failed or ran out of time. The message holds every rank's traceback."""


class RankPool:
    """Processes that run functions as gloo ranks. Started from a fork server, so torch is imported once."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "torch.distributed", "torch.distributed.tensor", __name__]
        )
        self._workers: list[tuple[Any, Connection, Path]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="cai-ranks-")

    def _grow(self, n: int) -> None:
        while len(self._workers) < n:
            ours, theirs = self._context.Pipe()
            dump = (
                Path(self._directory.name)
                / f"stacks-{os.getpid()}-{len(self._workers)}-{time.monotonic_ns()}"
            )
            process = self._context.Process(target=_work, args=(theirs, str(dump)), daemon=True)
            with _no_main_module():
                process.start()
            theirs.close()
            self._workers.append((process, ours, dump))

    def run(
        self, n: int, fn: Callable[..., Any], args: tuple, timeout: float, kwargs: dict[str, Any]
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on ranks 0..n-1 and return the results in rank order."""
        if not all(process.is_alive() for process, _, _ in self._workers):
            self.close()
        self._grow(n)
        store = Path(self._directory.name) / f"store-{time.monotonic_ns()}"
        payload = pickle.dumps((_reference(fn), pickle.dumps((args, kwargs))))
        pipes = {self._workers[rank][1]: rank for rank in range(n)}
        try:
            for pipe, rank in pipes.items():
                pipe.send((rank, n, str(store), timeout, list(sys.path), payload))
            results, errors = self._collect(pipes, time.monotonic() + timeout)
        except BaseException:  # an interrupt: replies still under way would answer the next call
            self.close()
            raise
        if errors:
            self.close()
            raise RankError(_told(errors))
        return [results[rank] for rank in range(n)]

    def _collect(
        self, pipes: dict[Connection, int], deadline: float
    ) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = dict(pipes)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    good, value = False, "the process died without a traceback"
                except Exception:
                    good, value = False, f"its result cannot be read here\n{traceback.format_exc()}"
                (results if good else errors)[rank] = value
                if not good:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in waiting.values():
            errors[rank] = "did not finish in time\n" + self._stacks(rank)
        return results, errors

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


def _told(errors: dict[int, str]) -> str:
    """How each rank ended, a line each, then all they said."""
    ends = [
        f"rank {rank} ended with: {text.strip().splitlines()[-1]}" for rank, text in sorted(errors.items())
    ]
    return "\n".join([*ends, *(f"rank {rank}: {text}" for rank, text in sorted(errors.items()))])


@contextlib.contextmanager
def _no_main_module():
    """Keep a new process from importing this one's `__main__` again, which for pytest is all of pytest."""
    main = sys.modules["__main__"]
    kept = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(kept)


def _reference(fn: Callable[..., Any]) -> tuple[str, str, str]:
    if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
        raise RankError(f"{fn.__qualname__} must be a function at the top level of a module")
    return fn.__module__, str(Path(sys.modules[fn.__module__].__file__ or "").resolve()), fn.__qualname__


def _resolve(reference: tuple[str, str, str], loaded: dict[str, Any]) -> Callable[..., Any]:
    module_name, path, qualname = reference
    if path not in loaded:
        loaded[path] = _load(module_name, path)
    target: Any = loaded[path]
    for part in qualname.split("."):
        target = getattr(target, part)
    return target


def _load(module_name: str, path: str) -> Any:
    with contextlib.suppress(ImportError):
        module = importlib.import_module(module_name)
        if str(Path(getattr(module, "__file__", None) or "").resolve()) == path:
            return module
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(f"ranks_{Path(path).stem}_{abs(hash(path))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = sys.modules[module_name] = module  # pickled classes name the latter
    spec.loader.exec_module(module)
    return module


class _Arguments(pickle.Unpickler):
    """Finds classes in modules that are loaded, also where the packages their names speak of cannot be imported."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        module = sys.modules.get(module_name)
        return (
            super().find_class(module_name, global_name) if module is None else getattr(module, global_name)
        )


def _work(pipe: Connection, dump: str) -> None:
    torch.set_num_threads(1)
    loaded: dict[str, Any] = {}
    with open(dump, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        while True:
            try:
                rank, world, store, timeout, path, payload = pipe.recv()
            except EOFError:
                return
            sys.path[:] = path
            try:
                reply = (True, _run_rank(rank, world, store, timeout, payload, loaded))
                encoded = pickle.dumps(reply)
            except BaseException:
                encoded = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(encoded)


def _run_rank(
    rank: int, world: int, store: str, timeout: float, payload: bytes, loaded: dict[str, Any]
) -> Any:
    import torch.distributed as dist

    reference, arguments = pickle.loads(payload)
    fn = _resolve(reference, loaded)  # first: the arguments may be of classes of its module
    args, kwargs = _Arguments(io.BytesIO(arguments)).load()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    try:
        dist.barrier()  # a rank with nothing to say must not leave while others still connect
        torch.manual_seed(0)
        return fn(*args, **kwargs)
    finally:
        dist.destroy_process_group()


_POOLS: dict[int, RankPool] = {}


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 180.0, **kwargs: Any) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `n` gloo ranks of this machine; returns their results in rank order.

    `fn` is a function at the top level of a module; arguments and results must pickle. torch.distributed is
    initialized around it. Processes are kept for the next call. Raises `RankError` with every failing rank's
    traceback, or the stacks of ranks that did not finish within `timeout` seconds.
    """
    if os.getpid() not in _POOLS:
        pool = _POOLS[os.getpid()] = RankPool()
        atexit.register(pool.close)
    return _POOLS[os.getpid()].run(n, fn, args, timeout, kwargs)


def assert_same_as_one_device(
    got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, tolerance: float
) -> None:
    """Compare named tensors with those of the one-process twin: max |a − b| / max |b| per tensor.

    A tensor that is zero by symmetry is measured against the largest one of its group (names alike but for the last
    two parts). Raises `AssertionError` with the worst offenders.
    """
    missing = set(expected) ^ set(got)
    if missing:
        raise AssertionError(f"names differ: {sorted(missing)}")
    scale: dict[str, float] = {}
    for name, value in expected.items():
        group = name.rsplit(".", 2)[0]
        scale[group] = max(scale.get(group, 0.0), float(value.detach().abs().max()) if value.numel() else 0.0)
    worst = []
    for name, value in expected.items():
        if got[name].shape != value.shape:
            raise AssertionError(f"{name}: shape {tuple(got[name].shape)}, expected {tuple(value.shape)}")
        if not value.numel():
            continue
        own, group = float(value.abs().max()), scale[name.rsplit(".", 2)[0]]
        size = own if own > 1e-6 * group else group
        error = float((got[name].double() - value.double()).abs().max()) / max(size, 1e-300)
        if not error <= tolerance:
            worst.append((error, name))
    if worst:
        lines = "\n".join(f"  {name}: {error:.3e}" for error, name in sorted(worst, reverse=True)[:8])
        raise AssertionError(
            f"{len(worst)} of {len(expected)} tensors differ by more than {tolerance:g}:\n{lines}"
        )


def assert_names_kept(before: Iterable[str], after: Sequence[str] | Iterable[str]) -> None:
    """Every name after a transform existed before it (a pipeline stage keeps a part of them)."""
    invented = sorted(set(after) - set(before))
    if invented:
        raise AssertionError(f"a transform invented parameter names: {invented}")
