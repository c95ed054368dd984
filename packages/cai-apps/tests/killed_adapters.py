"""A run of adapters that is killed at every step: `killed_adapters.py DIRECTORY FLAGS...`.

Each start is forked from this process, which has imported all, and killed at the next moment: before a step, after it,
while its checkpoint is written, and while the adapter is.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import peft  # noqa: F401 (forked runs have it then)
import transformers.models.llama.modeling_llama  # noqa: F401

import cai_apps.run.worker  # noqa: F401
from cai_apps.applications.language import task
from cai_apps.cli import main
from cai_apps.compose.session import Session
from cai_mesh.checkpoint import saving

STEPS = 3


def dying(function: Callable, when: Callable[..., bool], *, late: bool = False) -> Callable:
    """A function that kills its process where `when` is true of its arguments, before or after its work."""

    def called(*arguments: Any, **options: Any) -> Any:
        fatal = when(*arguments)
        if fatal and not late:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return called


def arm(moment: str, step: int) -> None:
    """Let this process die at a moment of a step."""
    if moment in ("before", "after"):
        Session.update = dying(
            Session.update, lambda session, *_: session.steps == step - 1, late=moment == "after"
        )
    elif moment == "saving":
        saving.seal = dying(saving.seal, lambda path, *_: f"step-{step}." in str(path))
    else:
        task.save_adapter = dying(task.save_adapter, lambda *_: True, late=True)


def start(flags: list[str], moment: str = "", step: int = 0) -> int:
    """The status of a forked run, which dies at a moment unless that is empty."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if moment:
        arm(moment, step)
    os._exit(main(flags))


def run(directory: str, flags: list[str]) -> None:
    whole = [*flags, "--log.directory", f"{directory}/whole"]
    assert start(whole) == 0
    killed = [*flags, "--log.directory", f"{directory}/killed", "--checkpoint.every", "1"]
    for step in range(1, STEPS + 1):
        for moment in ("before", "after", "saving"):
            status = start([*killed, "--checkpoint.background", "on" if step % 2 else "off"], moment, step)
            assert status == -signal.SIGKILL, (moment, step, status)
    assert start(killed, "export") == -signal.SIGKILL
    assert start(killed) == 0


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
