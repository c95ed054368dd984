"""The process of a rank: it waits for functions, runs them as a rank of a gloo group, and sends what they return."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import io
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cai_mesh.testing.process_state import SEED, ProcessState


@dataclass(frozen=True)
class Request:
    """One call of a function on a rank.

    Args:
        rank: the rank that this process is.
        world: number of ranks.
        store: file in which the ranks find each other; the name of their group, too.
        keep: whether the group stays for the next call, which names the same `store`.
        timeout: seconds that a collective may take.
        path: `sys.path` of the process that calls.
        payload: the function's reference and its pickled arguments.
    """

    rank: int
    world: int
    store: str
    keep: bool
    timeout: float
    path: list[str]
    payload: bytes


@dataclass(frozen=True)
class Reply:
    """The outcome of a call.

    Args:
        good: whether the function returned.
        value: the result of the function, or its traceback.
        sequence: operations that the group's default process group has started; None where it is gone.
    """

    good: bool
    value: Any
    sequence: int | None = None


def reference(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """Module, file and name of a function, by which a rank finds it."""
    return fn.__module__, str(Path(sys.modules[fn.__module__].__file__ or "").resolve()), fn.__qualname__


def serve(pipe: Connection, dump: str) -> None:
    """Answer requests until the other end of `pipe` is closed; a signal writes stacks into the file `dump`."""
    torch.set_num_threads(1)
    loaded: dict[str, Any] = {}
    group = Group()
    with open(dump, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        while True:
            try:
                request: Request = pipe.recv()
            except EOFError:
                return
            sys.path[:] = request.path
            try:
                value = _run(request, group, loaded)
                encoded = pickle.dumps(Reply(True, value, group.sequence()))
            except BaseException:
                encoded = pickle.dumps(Reply(False, traceback.format_exc()))
            pipe.send_bytes(encoded)


class Group:
    """The process groups of this rank, of one call or kept from call to call."""

    def __init__(self) -> None:
        self._store: str | None = None
        self._default: dist.ProcessGroup | None = None
        self._names: dist.Store | None = None
        self._calls = self._modules = 0

    def enter(self, request: Request) -> None:
        """Have the process group that `request` names: that of the last call, or a new one."""
        if request.store == self._store:
            return
        self.leave()
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(request.store, request.world),
            rank=request.rank,
            world_size=request.world,
            timeout=timedelta(seconds=request.timeout),
        )
        self._store, self._default = request.store, dist.group.WORLD
        self._names = dist.distributed_c10d._world.pg_map[self._default][1]
        dist.barrier()  # a rank with nothing to say must not leave while others still connect

    def clear(self) -> None:
        """Leave nothing of a call but the default process group.

        The next call has names of its own in the store, as a new process group may be called as one destroyed.
        """
        groups = dist.distributed_c10d._world.pg_map
        if self._default not in groups:  # the function has destroyed it
            return
        for group in [group for group in groups if group is not self._default]:
            dist.destroy_process_group(group)
        self._calls += 1
        backend, _ = groups[self._default]
        groups[self._default] = (backend, dist.PrefixStore(f"call-{self._calls}", self._names))
        gc.collect()
        if len(sys.modules) > self._modules:  # modules are most of the objects: walk them once only
            gc.freeze()
            self._modules = len(sys.modules)

    def leave(self) -> None:
        """Destroy all process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = self._default = None

    def sequence(self) -> int | None:
        """Number of the last operation of the default process group; ranks in step have the same."""
        if self._default is None or dist.group.WORLD is not self._default:
            return None
        return self._default._get_sequence_number_for_group()


def _run(request: Request, group: Group, loaded: dict[str, Any]) -> Any:
    module, arguments = pickle.loads(request.payload)
    fn = _resolve(module, loaded)  # first: the arguments may be of classes of its module
    args, kwargs = _Arguments(io.BytesIO(arguments)).load()
    try:
        group.enter(request)
        if request.keep:
            with ProcessState():
                value = fn(*args, **kwargs)
            group.clear()
            return value
        torch.manual_seed(SEED)
        return fn(*args, **kwargs)
    finally:
        # after an error, too: others that wait in a collective of a group that stays are told at once
        if not request.keep or sys.exception() is not None:
            group.leave()


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
