"""The training loop: what a step is, whatever the layout.

A step sums the loss of its target tokens and divides by their number in the whole global batch, so masks,
packing, microbatches and data ranks change nothing; the session then sums gradients over the data ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.config import Config
from cai_apps.data.batches import Batches, count_targets
from cai_apps.flops import TokenFlops, peak_flops
from cai_apps.memory import peak_memory
from cai_apps.metrics import Metrics
from cai_apps.schedule import learning_rate
from cai_mesh.comm import DATA_AXES, all_reduce, group
from cai_mesh.errors import DataError


@dataclass(frozen=True)
class Position:
    """How far a run is: the part of its state that is neither weights nor optimizer."""

    step: int = 0
    samples: int = 0
    """Sequences consumed; where the next global batch starts in the shuffled order."""
    tokens: int = 0


class Trainable(Protocol):
    """What the loop drives; `cai_apps.apply.Session` is one."""

    config: Config
    mesh: DeviceMesh

    def step(self, microbatches: list[dict[str, Tensor]], *, total_tokens: int) -> Tensor: ...
    def update(self, lr: float) -> Tensor: ...
    def evaluate(self, microbatches: list[dict[str, Tensor]], *, total_tokens: int) -> Tensor: ...


@dataclass
class Loop:
    """Trains a session from a position to `config.train.steps`."""

    session: Trainable
    training: Batches
    validation: Batches | None
    device: torch.device
    flops: TokenFlops
    on_step: Callable[[Metrics, Position], None]
    """Called on every rank after every step."""

    def run(self, position: Position) -> Position:
        """Trains from `position`; returns where it ended.

        Raises:
            DataError: the loss is not finite, or a global batch has no target token.
        """
        while position.step < self.session.config.train.steps:
            position, metrics = self._step(position)
            every = self.session.config.train.validate_every
            if self.validation and every and (position.step % every == 0 or position.step == self._steps):
                metrics = replace(metrics, validation_loss=self.validate(self.validation))
            self.on_step(metrics, position)
        return position

    @property
    def _steps(self) -> int:
        return self.session.config.train.steps

    def _step(self, position: Position) -> tuple[Position, Metrics]:
        config, start = self.session.config, time.perf_counter()
        lr = learning_rate(position.step, config.optimizer.lr, config.lr_schedule)
        microbatches, total = self._read(self.training, position.samples)
        loss = self.session.step(microbatches, total_tokens=total)
        norm = self.session.update(lr)
        value = self._sum_over_data(loss)
        if not math.isfinite(value):
            raise DataError(
                f"the loss of step {position.step + 1} is not finite",
                got=value,
                cause="often a learning rate that is too high",
                fix="lower optimizer.lr or lengthen lr_schedule.warmup_steps",
            )
        tokens = config.train.global_batch * config.data.sequence_length
        position = Position(
            position.step + 1, position.samples + config.train.global_batch, position.tokens + tokens
        )
        seconds = time.perf_counter() - start
        return position, self._metrics(position, value, float(norm), lr, tokens, seconds)

    def validate(self, batches: Batches) -> float:
        """Mean loss per target token of at most `validation_batches` global batches."""
        summed, targets = 0.0, 0
        whole = max(1, batches.split.size // batches.global_batch)
        for batch in range(min(whole, self.session.config.train.validation_batches)):
            microbatches, total = self._read(batches, batch * batches.global_batch)
            summed += self._sum_over_data(self.session.evaluate(microbatches, total_tokens=total)) * total
            targets += total
        return summed / targets

    def _read(self, batches: Batches, samples: int) -> tuple[list[dict[str, Tensor]], int]:
        """This rank's microbatches on its device; the target tokens of the whole global batch."""
        microbatches = batches.at(samples)
        total = int(self._sum_over_data(torch.tensor(count_targets(microbatches), dtype=torch.float64)))
        if total == 0:
            raise DataError("a global batch has no target token", expected="some label that is not -100")
        return [
            {name: value.to(self.device) for name, value in batch.items()} for batch in microbatches
        ], total

    def _sum_over_data(self, value: Tensor) -> float:
        value = value.detach().to(device=self.device, dtype=torch.float64)
        all_reduce(value, group(self.session.mesh, DATA_AXES)).wait()
        return value.item()

    def _metrics(
        self, position: Position, loss: float, norm: float, lr: float, tokens: int, seconds: float
    ) -> Metrics:
        per_rank = tokens / seconds / self.session.mesh.size()
        peak = peak_flops(self.device)
        return Metrics(
            step=position.step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            tokens=position.tokens,
            tokens_per_second=tokens / seconds,
            tflops=per_rank * self.flops.causal / 1e12,
            mfu=per_rank * self.flops.causal / peak if peak else None,
            mfu_full_attention=per_rank * self.flops.full / peak if peak else None,
            memory_bytes=peak_memory(self.device),
            step_seconds=seconds,
        )
