"""Processes that save checkpoints and come to harm: killed at a given change of the disk, or out of disk space."""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from cai_mesh import checkpoint

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def constant(value, tensors=4):
    """A state that shows by each of its parts which save it is from."""
    return {f"w{i}": torch.full((64,), float(value)) for i in range(tensors)} | {"value": value}


def held(path):
    """The one value that a loadable checkpoint holds; fails when parts of it differ."""
    state = constant(float("nan"))
    values = checkpoint.load(path, state)
    found = {float(x) for name in state if name != "value" for x in state[name]} | {float(values["value"])}
    assert len(found) == 1, f"{path} is mixed: {found}"
    return found.pop()


def start(action: Callable[[], None]) -> int:
    """Run `action` in a process forked from this one; returns its id. It ends with 0, or with 1 if it raised."""
    pid = os.fork()
    if pid:
        return pid
    try:
        action()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(pid: int) -> int:
    """How a process ended: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_before(change: int, directory: Path) -> None:
    """Kill this process just before the `change`-th thing it is to change below a directory, from 0."""
    left = [change]

    def heard(event, args):
        if event not in CHANGES and not (event == "open" and isinstance(args[2], int) and args[2] & WRITING):
            return
        by_name = event in ("os.remove", "os.rmdir")  # a tree is removed by names within open directories
        if by_name or str(args[0]).startswith(f"{directory}/"):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(heard)


def full_beyond(nbytes: int) -> None:
    """Let no file of this process grow beyond `nbytes`: writing more raises `OSError`, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
