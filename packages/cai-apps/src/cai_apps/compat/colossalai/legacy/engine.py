"""The engine of the first generation: a model, its criterion and its optimizer, boosted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from cai_apps.booster import Booster
from cai_apps.compat.colossalai.legacy.core import global_context
from cai_mesh.errors import ConfigError

__all__ = ["Engine", "initialize"]


class Engine:
    """Trains a model by `zero_grad`, a call, `criterion`, `backward` and `step`, or by `execute_schedule`.

    Args:
        booster: the booster.
        model, optimizer, criterion: the results of `boost`.
        every: backwards of a step.
    """

    def __init__(self, booster: Booster, model: Any, optimizer: Any, criterion: Any, every: int):
        self.booster, self.model, self.optimizer, self.criterion = booster, model, optimizer, criterion
        self._every, self._count = every, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def train(self) -> None:
        """Let the model train."""
        self.model.train()

    def eval(self) -> None:
        """Let the model evaluate."""
        self.model.eval()

    def zero_grad(self) -> None:
        """Drop the gradients, but for those of a step that goes on."""
        if self._count % self._every == 0:
            self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, divided by the backwards of a step."""
        last = (self._count + 1) % self._every == 0
        with nullcontext() if last else self.booster.no_sync(self.model, self.optimizer):
            self.booster.backward(loss / self._every, self.optimizer)

    def step(self) -> None:
        """Step, after as many backwards as the config says."""
        self._count += 1
        if self._count % self._every == 0:
            self.optimizer.step()

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Any]:
        """Run forward and backward of the next batch, which is (data, label); return output, label and loss.

        Args:
            data_iter: an iterator of batches.
            forward_only: whether nothing is trained.
            return_loss, return_output_label: whether these are returned.

        Raises:
            ConfigError: a pipeline is given batches that name no arguments of the model.
        """
        data, label = next(data_iter)
        if self.booster.config.parallel.pipeline.size > 1:
            if not isinstance(data, Mapping):
                raise ConfigError(
                    "a pipeline is given the model's arguments by name",
                    got=type(data).__name__,
                    fix='let the loader return ({"input_ids": ...}, label)',
                )
            outputs = self.booster.execute_pipeline(
                iter([data]),
                self.model,
                self._by_microbatch(label),
                None if forward_only else self.optimizer,
                return_outputs=return_output_label,
            )
            return outputs["outputs"], label if return_output_label else None, outputs["loss"]
        output = self.model(**data) if isinstance(data, Mapping) else self.model(data)
        loss = self.criterion(output, label)
        if not forward_only:
            self.backward(loss)
        predictions, target = (output, label) if return_output_label else (None, None)
        return predictions, target, loss if return_loss else None

    def _by_microbatch(self, label: Tensor) -> Callable[[Any, Any], Tensor]:
        """Return a criterion that knows which part of the labels a microbatch has: forwards are in their order."""
        start = [0]

        def criterion(output: Any, inputs: Mapping[str, Tensor]) -> Tensor:
            size = len(next(iter(inputs.values())))
            begin, start[0] = start[0], start[0] + size
            return self.criterion(output, label[begin : begin + size].to(self.model.device))

        return criterion


def initialize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Any,
    criterion: Any = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: Any = None,
    ophooks: Any = None,
    verbose: bool = True,
) -> tuple[Engine, Any, Any, Any]:
    """Return the engine of a model on the ranks of the config that was launched with, the loaders and the schedule.

    Args:
        model: the module, or what makes it.
        optimizer: an optimizer over its parameters.
        criterion: (output, label) -> the loss.
        train_dataloader, test_dataloader, lr_scheduler: returned as they are.
        ophooks: not here.
        verbose: unused.

    Raises:
        ConfigError: hooks are given, or the config asks for what is not here.
    """
    if ophooks:
        raise ConfigError(
            "initialize takes no ophooks", fix="model.register_forward_hook(...) before initialize"
        )
    module = model if isinstance(model, nn.Module) else model()
    booster = Booster(plugin=global_context.plugin)
    boosted, stepped, _, _, schedule = booster.boost(module, optimizer, lr_scheduler=lr_scheduler)
    every = int(global_context.config.get("gradient_accumulation") or 1)
    engine = Engine(booster, boosted, stepped, criterion, every)
    return engine, train_dataloader, test_dataloader, schedule
