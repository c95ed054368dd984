"""All probes of a rank. What cannot be written is told in a line, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from cai_apps.config.sections import Log
from cai_apps.config.steps import steps_of
from cai_apps.run.probes.memory import MemoryHistory
from cai_apps.run.probes.operators import OperatorTrace


class Probes:
    """Follows the steps of a rank, of which a config has some traced.

    Args:
        log: the section of the config that says which.
        directory: the run's directory.
        device: this rank's device.
    """

    def __init__(self, log: Log, directory: Path, device: torch.device):
        rank = dist.get_rank()
        chosen = rank in log.trace_ranks
        steps = steps_of(log.trace, "log.trace") if chosen else range(0)
        self._operators = OperatorTrace(steps, directory, rank, device)
        self._memory = MemoryHistory(steps_of(log.snapshot, "log.snapshot"), directory, rank, chosen, device)
        self._rank = rank

    def before(self, step: int) -> None:
        """Called before every step."""
        self._told("memory", lambda: self._memory.before(step))
        self._told("trace", lambda: self._operators.before(step))

    def after(self, step: int) -> None:
        """Called after every step."""
        self._told("trace", lambda: self._operators.after(step))
        self._told("memory", lambda: self._memory.after(step))

    def failed(self, error: BaseException) -> None:
        """Called with what ends this rank."""
        self._told("memory", lambda: self._memory.failed(error))

    def close(self) -> None:
        """Write what is left, and end."""
        self._told("trace", self._operators.close)
        self._told("memory", self._memory.close)

    def _told(self, what: str, write: Callable[[], Path | None]) -> None:
        """Write a file and say where it is, or why it is not."""
        try:
            path = write()
        except Exception as error:  # whatever private interfaces of torch bring: a probe ends no run
            line = (str(error).splitlines() or [""])[0][:200]
            print(f"{what} of rank {self._rank} not written, the run goes on ({line})", flush=True)
            return
        if path is not None:
            print(f"{what} of rank {self._rank}: {path}", flush=True)
