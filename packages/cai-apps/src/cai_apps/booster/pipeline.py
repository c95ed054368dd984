"""`execute_pipeline`: a batch of a user's loop as microbatches of cai-pipeline's runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cai_apps.booster.config import BoostConfig
from cai_apps.booster.model import BoostedModel
from cai_apps.booster.optimizer import BoostedOptimizer
from cai_mesh.errors import ConfigError
from cai_mesh.protocols import GradSync
from cai_pipeline import PipelineRunner, Stages
from cai_zero import ModuleSharding

Criterion = Callable[[Any, Any], Tensor]


@dataclass
class BatchLoss:
    """The loss of a microbatch as a runner takes it: the user's criterion, divided by the microbatches.

    Args:
        criterion: (output of the model, microbatch) -> a mean.
        model: the boosted model.
        count: the number of microbatches.
        optimizer: the optimizer, which scales the loss; None: nothing is scaled.
        outputs: a list for outputs of the model; None: they are not kept.
    """

    criterion: Criterion
    model: BoostedModel
    count: int
    optimizer: BoostedOptimizer | None = None
    outputs: list[Any] | None = None

    def __call__(self, output: Any, microbatch: Any) -> Tensor:
        model = self.model
        output = model.with_dtype(output, model.outputs)
        loss = self.criterion(output, microbatch)
        if model.rows is not None:
            loss = model.rows.whole(loss)
        if self.outputs is not None:
            self.outputs.append(_detached(output))
        loss = loss / self.count
        return loss if self.optimizer is None else self.optimizer.scale_loss(loss)


@dataclass
class Sync:
    """What reduces gradients at the end of a step; under `no_sync` they stay.

    Args:
        inner: the reducer.
        stays: whether gradients stay here this time.
    """

    inner: GradSync
    stays: Callable[[], bool] = field(default=lambda: False)

    def defer(self) -> AbstractContextManager[None]:
        """Return a context in which backwards only add up gradients."""
        return self.inner.defer()

    def finish(self) -> None:
        """Reduce what is pending."""
        if not self.stays():
            self.inner.finish()


class Pipeline:
    """Runs a boosted model's batches through its stages.

    Args:
        config: the resolved config.
        mesh: the mesh of the ranks.
        microbatch_size: samples of a microbatch, where the config does not say how many microbatches a batch has.
    """

    def __init__(self, config: BoostConfig, mesh: Any, microbatch_size: int | None):
        self._config, self._mesh, self._size = config, mesh, microbatch_size
        self._count = config.parallel.pipeline.microbatches if microbatch_size is None else None

    def step(
        self,
        batches: Iterator[Any],
        model: BoostedModel,
        criterion: Criterion,
        optimizer: BoostedOptimizer | None,
        *,
        keeps_outputs: bool = False,
    ) -> tuple[Tensor, Any]:
        """Run forward, and backward where there is an optimizer and gradients are on, of the next batch.

        Returns the mean loss of the microbatches, a float32 scalar, on every rank; and the output for the batch,
        where it is kept, on the rank of the last stage; else None.
        """
        microbatches = self._microbatches(next(batches), model)
        trains = optimizer is not None and torch.is_grad_enabled()
        runner = self._runner(model, optimizer if trains else None, len(microbatches))
        outputs: list[Any] | None = [] if keeps_outputs else None
        loss_fn = BatchLoss(criterion, model, len(microbatches), optimizer if trains else None, outputs)
        inputs = [model.ready(microbatch) for microbatch in microbatches]
        if model.rows is not None:
            inputs = [model.rows.cut((), microbatch) for microbatch in inputs]
        if trains:
            runner.loss_fn = loss_fn
            loss = runner.step(inputs, inputs)
            scale = optimizer.loss_scale if optimizer is not None else None
            loss = loss if scale is None else scale.unscaled(loss)
        else:
            loss = runner.evaluate(inputs, inputs, loss_fn=loss_fn)
        return loss.float(), _joined(outputs) if outputs else None

    def _microbatches(self, batch: Any, model: BoostedModel) -> list[Mapping[str, Any]]:
        """Return the parts of a batch, each a mapping of the model's arguments by name."""
        named = _named(batch)
        sizes = {value.shape[0] for value in named.values() if isinstance(value, Tensor) and value.dim()}
        if len(sizes) != 1:
            raise ConfigError(
                "the tensors of a batch have not the same number of samples",
                got=", ".join(
                    f"{key} {tuple(tensor.shape)}"
                    for key, tensor in named.items()
                    if isinstance(tensor, Tensor)
                ),
                expected="the samples along the first dimension of each",
            )
        samples = sizes.pop()
        count = self._count or samples // (self._size or samples)
        if count == 0 or samples % count or (self._size is not None and samples % self._size):
            raise ConfigError(
                "a batch does not divide into microbatches",
                got=f"{samples} samples",
                expected=f"a multiple of {self._size or count}",
                fix="drop_last=True of prepare_dataloader, or another microbatch_size",
            )
        size = samples // count
        return [
            {name: _part(value, start, size) for name, value in named.items()}
            for start in range(0, samples, size)
        ]

    def _runner(self, model: BoostedModel, optimizer: BoostedOptimizer | None, count: int) -> PipelineRunner:
        """Return the runner for so many microbatches, made when they first come. Collective."""
        pipeline = self._config.parallel.pipeline
        if count not in model.runners:
            sync = None if optimizer is None else optimizer.sync
            model.runners[count] = PipelineRunner(
                model.module,
                self._mesh,
                schedule=pipeline.schedule,
                microbatches=count,
                loss_fn=lambda output, target: output,
                sharding=sync if isinstance(sync, ModuleSharding) else None,
                wire=pipeline.wire,
            )
        runner = model.runners[count]
        if optimizer is not None and optimizer.sync is not None:
            runner.grad_sync = Sync(optimizer.sync, lambda: optimizer.deferred)
        return runner


def has_last_stage(model: BoostedModel) -> bool:
    """Return whether this rank computes what the model returns."""
    return Stages.of(model.module).has_last


def _named(batch: Any) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        return batch
    raise ConfigError(
        "a batch of a pipeline is a mapping of the model's arguments by name",
        got=type(batch).__name__,
        expected='such as {"input_ids": ..., "labels": ...}',
        fix="let the collate function of the loader return a dict",
    )


def _part(value: Any, start: int, size: int) -> Any:
    return value[start : start + size] if isinstance(value, Tensor) and value.dim() else value


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {name: _detached(part) for name, part in value.items() if part is not None}
    return tuple(map(_detached, value)) if isinstance(value, tuple) else value


def _joined(outputs: list[Any]) -> Any:
    """Return what a model has returned of microbatches as one: tensors one after the other, scalars as their mean."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.dim() else torch.stack(outputs).mean()
    if isinstance(first, Mapping):
        return {name: _joined([output[name] for output in outputs]) for name in first}
    if isinstance(first, tuple):
        return tuple(map(_joined, map(list, zip(*outputs, strict=True))))
    return first
