"""Protocol of an application for the shared loop, and what a run makes of it.

A `Task` is the application itself: how its runs are resolved, prepared, built, exported and ended. A `Job` is one run
of it, decided before ranks start: task, resolved config, directory, what was prepared. `Work` is what a rank does of a
job: a `Workload` (`compose/workload.py`: model and loss, which know no data) with samples, counts and FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from cai_apps.compose.workload import Workload
from cai_apps.data.batches import Blank, Samples
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.origin import Origin
from cai_apps.run.files.position import Unit

if TYPE_CHECKING:
    from cai_apps.compose.session import Session


@dataclass(frozen=True)
class Work:
    """Training of one rank: a workload with the samples that it is trained on.

    Args:
        workload: the model and its loss.
        training, validation: the samples that are read; None: no validation.
        count: (microbatch) -> its part of the divisor of the summed loss (its target tokens, its images).
        counted: name of what is counted, in messages.
        unit: the unit of throughput.
        flops: functions of a microbatch on the host that count its FLOPs of forward and backward, without recompute, by
            the name of the share of the device's peak that metrics report; the first is also reported as TFLOP/s.
        texts: a function of the session that returns what it has to say after a validation, by the name of each text,
            such as continuations of prompts. Collective.
        after_step: a function of the session and a step's number, called after the step on every rank. Collective.
        completed: a function of the rank's device that returns the work with what is computed before the model that
            learns has memory, such as log-probabilities of a reference. Collective.
        blank: (rows, bool [n]) -> the rows, of which those that are marked have no target: they fill the last batch of
            validation, so that each target counts once.
        in_order: whether the samples that are trained on have an order of their own, as those of a stream do.
    """

    workload: Workload
    training: Samples
    validation: Samples | None
    count: Callable[[dict[str, Tensor]], int]
    counted: str
    unit: Unit
    flops: Mapping[str, Callable[[dict[str, Tensor]], float]] = field(default_factory=dict)
    texts: Callable[[Session], Mapping[str, str]] | None = None
    after_step: Callable[[Session, int], None] | None = None
    completed: Callable[[torch.device], Work] | None = None
    blank: Blank | None = None
    in_order: bool = False


class Task(Protocol):
    """An application as a run sees it. It travels to the ranks with the job, so it holds nothing of its own."""

    def resolve(self, config: Any, ranks: int) -> Any:
        """The config with everything worked out for so many ranks. Raises `CaiError` for what cannot be."""
        ...

    def workload(self, config: Any) -> Workload:
        """What a resolved config trains, as far as it is known before data are prepared."""
        ...

    def prepare(self, config: Any, before: RunDirectory | None = None) -> Any:
        """Make on this machine what ranks read (tokens, latents), unless it is there; says where. Picklable.

        Args:
            config: the resolved config.
            before: the run whose weights are gone on with, and with them its tokenizer and its names of classes.
        """
        ...

    def origin(self, prepared: Any) -> Origin:
        """Return what prepared data are, by content."""
        ...

    def base(self, config: Any) -> str | None:
        """Return a digest of the weights that stay as they are beside those that learn; None: all weights learn.

        They are read again by `Workload.pretrained` when a run goes on: checkpoints lack them.
        """
        ...

    def announce(self, config: Any, prepared: Any) -> str:
        """What is trained on what, in a few words."""
        ...

    def fill(self, job: Job) -> None:
        """Write what else belongs into a new run directory."""

    def work(self, job: Job) -> Work:
        """What a rank trains."""
        ...

    def export(self, session: Session, job: Job) -> None:
        """Write the trained model to `job.run.export`. Collective."""

    def finish(self, job: Job) -> None:
        """Show on the first rank what came out; `cai_apps.report.outcome` has what every run shows."""


@dataclass(frozen=True)
class Job:
    """One run of a task: all that a rank needs to know, decided once, before training starts."""

    task: Task
    config: Any
    directory: Path
    prepared: Any
    """What `task.prepare` returned."""
    device: str
    """"cpu" or "cuda"."""
    new_data: bool = True
    """Whether a run that goes on may find other data than its checkpoint was trained on."""
    base: str | None = None
    """What `task.base` returned."""

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.directory)

    @property
    def origin(self) -> Origin:
        """What the run learns from, by content."""
        return replace(self.task.origin(self.prepared), base=self.base)
