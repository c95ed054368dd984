"""The training loop: what a step is, whatever the layout and the application.

A step sums the loss of its batch and divides by what the whole global batch counts (target tokens, images), so masks,
packing, microbatches and data ranks change nothing; the session then sums gradients over the data ranks.

The host waits for the device once a step, on the loss and the gradient norm together, when it has asked for clipping
and update: while the device updates, the host begins the next step. What is not finite changes no weight, and ends the
run there, on all ranks, with weights and checkpoints as they were. Batches are read ahead by a thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.compose.step_loss import Evaluation
from cai_apps.config.sections import RunConfig
from cai_apps.data.batches import Batches, Microbatches, Prefetch
from cai_apps.run.files.position import VALIDATION, Position
from cai_apps.run.loop.learning_rate import learning_rate
from cai_apps.run.loop.maxima import greatest_of_ranks
from cai_apps.run.loop.metrics import Metrics, Speed, peak_flops, perplexity
from cai_apps.run.task import Work
from cai_mesh.comm import DATA_AXES, all_reduce, group
from cai_mesh.errors import DataError

ERRORS_ARE_FAULTS = True
"""Read by `run/health/user_errors.py` in the frames of a traceback."""
MOST_LEFT_OUT = 40
"""Steps that may overflow in a row: a loss scale that was halved so often is not the cause any more."""


class Trainable(Protocol):
    """What the loop drives; `cai_apps.compose.session.Session` is one."""

    config: RunConfig
    mesh: DeviceMesh
    steps: int
    measures: Tensor | None

    @property
    def skips(self) -> bool: ...
    def step(self, microbatches: Sequence[dict[str, Tensor]], *, total: Tensor | float) -> Tensor: ...
    def routing(self) -> dict[str, Tensor]: ...
    def norm(self) -> Tensor: ...
    def update(self, lr: float, norm: Tensor | float) -> None: ...
    def evaluate(self, microbatches: Sequence[dict[str, Tensor]], *, total: Tensor | float) -> Evaluation: ...
    def find_broken(
        self, microbatches: Sequence[dict[str, Tensor]], *, total: Tensor | float
    ) -> str | None: ...


def reading(values: Sequence[Tensor], device: torch.device) -> Callable[[], list[float]]:
    """Scalars as they are now, for the host; the wait for them begins when what this returns is called.

    What the device is given meanwhile is not waited for: while it steps the weights, the host begins the next step.
    """
    scalars = torch.stack([value.detach().to(device, torch.float64) for value in values])
    if device.type != "cuda":
        return scalars.tolist
    on_host, arrived = scalars.to("cpu", non_blocking=True), torch.cuda.Event()
    arrived.record()

    def wait() -> list[float]:
        arrived.synchronize()
        return on_host.tolist()

    return wait


@dataclass
class Loop:
    """Trains a session from a position to `config.train.steps`."""

    session: Trainable
    work: Work
    training: Batches
    validation: Batches | None
    device: torch.device
    on_step: Callable[[Metrics, Position], None]
    """Called on every rank after every step."""
    asked: Callable[[], int] = int
    """The signal that asked this rank to stop; 0: none did. Ranks agree on it in every step."""
    by_clock: Callable[[], bool] = bool
    """Whether a checkpoint is due by this rank's clock. Ranks agree on it in every step: one is enough."""
    paused: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context of what is no step, and may take longer."""
    due: bool = False
    """Whether a checkpoint is due by a clock after the step that was just done."""
    stopped: int = 0
    """The signal that ended the run after a step; 0: none did."""
    last_finite: int | None = None
    """The last step that was finite, of a run that ended because those after it were not."""
    _since: float = field(default_factory=time.perf_counter)
    _left_out: int = 0
    """Steps in a row that were left out for an overflow in float16."""

    def run(self, position: Position) -> Position:
        """Trains from `position`; returns where it ended, which `stopped` explains if it is not the last step.

        Raises:
            DataError: a loss or a gradient is not finite, or a global batch has nothing to compare with.
        """
        prefetch = Prefetch(self.training, self.device)
        speed = Speed(self.work.unit, self.session.mesh.size(), peak_flops(self.device))
        self._since = time.perf_counter()
        try:
            while position.step < self._steps and not (self.stopped or self.ends(position)):
                position, metrics = self._step(position, prefetch, speed)
                if self._validates(position.step):
                    with self.paused():
                        metrics = replace(metrics, **self._validate())
                    position = self._judged(position, metrics)
                    self._since = time.perf_counter()
                self.on_step(metrics, position)
        finally:
            prefetch.close()
        return position

    def ends(self, position: Position) -> bool:
        """Whether validations end the run at a position before its last step."""
        early = position.standing.ends(self.session.config.early_stopping)
        return early and position.step < self._steps

    def _judged(self, position: Position, metrics: Metrics) -> Position:
        """Return a position with its last validation."""
        assert metrics.validation_loss is not None
        options = self.session.config.early_stopping
        standing = position.standing.after(position.step, metrics.validation_loss, options)
        return replace(position, standing=standing)

    @property
    def _steps(self) -> int:
        return self.session.config.train.steps

    def _validates(self, step: int) -> bool:
        every = self.session.config.train.validate_every
        return bool(self.validation and every and (step % every == 0 or step == self._steps))

    def _step(self, position: Position, prefetch: Prefetch, speed: Speed) -> tuple[Position, Metrics]:
        config, session = self.session.config, self.session
        lr = learning_rate(position.step, config.optimizer.lr, config.lr_schedule)
        on_host, batch = prefetch.take(position.samples, last=position.step + 1 == self._steps)
        counts = self._counts(on_host, self.work.count, *self.work.flops.values())
        total = counts[0]
        losses, norms = self._summed(session.step(batch, total=total)), session.norm()
        agreed = greatest_of_ranks(self.device, self.asked(), self.by_clock())
        measures, routing = self._measured(session.measures).flatten(), session.routing()
        read = reading([losses, norms, *agreed, *routing.values(), *counts, *measures], self.device)
        # a step whose loss or norm is not finite is left out, and looked at below
        session.update(lr, norms.masked_fill(~losses.isfinite(), math.nan))
        loss, norm, memory, stopped, due, *numbers_read = read()
        by_routers, (targets, *numbers_read) = numbers_read[: len(routing)], numbers_read[len(routing) :]
        flops, ratios = numbers_read[: len(self.work.flops)], numbers_read[len(self.work.flops) :]
        seconds, self._since = time.perf_counter() - self._since, time.perf_counter()
        self.stopped, self.due = int(stopped), bool(due)
        self._left_out = 0 if math.isfinite(norm) else self._left_out + 1
        endless = self._left_out > (MOST_LEFT_OUT if session.skips else 0)
        if not math.isfinite(loss) or endless:
            self._stop(position.step, batch, loss, norm, targets)
        samples = config.train.global_batch
        units = samples * self.work.unit.per_sample
        position = Position(
            position.step + 1, position.samples + samples, position.units + units, position.standing
        )
        numbers: dict[str, Any] = {"loss": loss, "grad_norm": norm, "lr": lr, "memory_bytes": int(memory)}
        numbers |= {"measures": self._ratios(ratios), "routing": dict(zip(routing, by_routers, strict=True))}
        named = dict(zip(self.work.flops, flops, strict=True))
        return position, speed.metrics(position, samples, seconds, named, **numbers)

    def _counts(self, on_host: Microbatches, *counters: Callable[[dict[str, Tensor]], float]) -> Tensor:
        """What functions count in the whole global batch, float64 on the device; nobody waits for it here."""
        local_counts = [sum(map(counter, on_host)) for counter in counters]
        counts = torch.tensor(local_counts, dtype=torch.float64)
        if self.device.type == "cuda":
            counts = counts.pin_memory()
        return self._summed(counts.to(self.device, non_blocking=True))

    def _measured(self, measures: Tensor | None) -> Tensor:
        """Return numerators and denominators of the whole global batch, float64 [2, names]."""
        return torch.zeros(2, 0) if measures is None else self._summed(measures)

    def _ratios(self, measures: Sequence[float], prefix: str = "") -> dict[str, float]:
        """Return what the loss measures by name, from numerators and then denominators; 0 of nothing is left out."""
        names = self.work.workload.measures
        halves = measures[: len(names)], measures[len(names) :]
        return {prefix + name: a / b for name, a, b in zip(names, *halves, strict=True) if b}

    def _summed(self, value: Tensor) -> Tensor:
        value = value.detach().to(self.device, torch.float64, copy=True)
        all_reduce(value, group(self.session.mesh, DATA_AXES)).wait()
        return value

    def _stop(self, step: int, batch: Microbatches, loss: float, norm: float, total: float) -> NoReturn:
        """Ends the run in the step after `step` others, on every rank alike. Collective."""
        if total == 0:
            raise DataError(
                f"the global batch of step {step + 1} has no {self.work.counted}",
                cause="all its labels are ignored, or the data is empty",
            )
        self.last_finite = step + 1 - max(1, self._left_out)
        origins: list[str | None] = [None] * dist.get_world_size()
        self.session.steps = step  # the same random numbers again
        dist.all_gather_object(origins, self.session.find_broken(batch, total=total))
        where = next(
            (f"on rank {rank}, {name}" for rank, name in enumerate(origins) if name), "in no one module"
        )
        raise DataError(
            f"the {'gradient norm' if math.isfinite(loss) else 'loss'} of step {step + 1} is not finite",
            got=f"loss {loss}, gradient norm {norm}; {where}",
            cause="often a learning rate that is too high, or a damaged sample",
            fix="lower optimizer.lr or lengthen lr_schedule.warmup_steps; started again in its directory, the run goes"
            " on from its newest checkpoint after which a step was finite",
        )

    def _validate(self) -> dict[str, Any]:
        """Fields of `Metrics` from at most `validation_batches` global batches; each target counts once."""
        batches = self.validation
        assert batches is not None
        count = -(-batches.samples.size // batches.global_batch)
        losses, targets, correct = torch.zeros(3, dtype=torch.float64, device=self.device)
        measures = torch.zeros(2, len(self.work.workload.measures), dtype=torch.float64, device=self.device)
        counts_correct = False
        for batch in range(min(count, self.session.config.train.validation_batches)):
            on_host = batches.at(batch * batches.global_batch)
            on_device = [
                {name: value.to(self.device) for name, value in microbatch.items()} for microbatch in on_host
            ]
            (total,) = self._counts(on_host, self.work.count)
            evaluation = self.session.evaluate(on_device, total=1.0)
            losses += self._summed(evaluation.loss)
            targets += total
            if evaluation.correct is not None:
                counts_correct = True
                correct += self._summed(evaluation.correct)
            if evaluation.measures is not None:
                measures += self._measured(evaluation.measures)
        loss, accuracy = (torch.stack([losses, correct]) / targets).tolist()
        ratios = self._ratios(measures.flatten().tolist(), VALIDATION)
        fields: dict[str, Any] = {"validation_loss": loss, "validation_measures": ratios}
        if counts_correct:
            fields["validation_accuracy"] = accuracy
        if counts_correct and self.work.unit.name == "tokens":
            fields["validation_perplexity"] = perplexity(loss)
        if self.work.texts is not None:
            fields["texts"] = self.work.texts(self.session)
        return fields
