"""An exponential moving average of weights, of which each rank keeps what it holds (Polyak and Juditsky, 1992)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from cai_mesh.layout import BoxedTensor, canonical_name
from cai_zero.optimizer import ShardedOptimizer


class Ema:
    """average = decay * average + (1 - decay) * weights, after each optimizer step.

    In stages 0 to 2 of the optimizer's master weights, a shard a rank; in stage 3 and under offload of this rank's
    shards, where they are; of a plain model of its parameters. Averages are in float32 at least. Frozen parameters have
    none.

        ema = Ema(model, optimizer, decay=0.999)
        for batch in batches:
            ...
            optimizer.step()
            ema.update()
        with ema.applied():
            evaluate(model)

    Args:
        model: as `shard_module` or `offload` returned it, one over which an optimizer is sharded, or a plain one.
        optimizer: what `shard_optimizer` returned, for stages 0 to 2; others are not looked at.
        decay: between 0 and 1.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, decay: float = 0.999
    ):
        self.decay = decay
        self._sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        self._model = model
        self._averages = [_wide(value) for value in self._weights()]

    def _weights(self) -> list[torch.Tensor]:
        if self._sharded is not None:
            return [chunk.flat for chunk in self._sharded._chunks]
        return [param for param in self._model.parameters() if param.requires_grad]

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of now into the average. Talks to nobody."""
        if self._sharded is not None:
            self._sharded.take_writes()
        for average, value in zip(self._averages, self._weights(), strict=True):
            average.lerp_(value.detach().to(average.dtype), 1.0 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages for weights. Collective where weights are sharded."""
        before = [value.detach().clone() for value in self._weights()]
        self._put(self._averages)
        try:
            yield
        finally:
            self._put(before)

    @torch.no_grad()
    def _put(self, values: list[torch.Tensor]) -> None:
        for value, weight in zip(values, self._weights(), strict=True):
            weight.copy_(value)
        if self._sharded is not None:
            self._sharded.publish()

    def state_for_checkpoint(self) -> dict[str, BoxedTensor]:
        """The averages by canonical parameter name, for `cai_mesh.checkpoint` on any layout: views, loaded in place."""
        if self._sharded is not None:
            chunks = zip(self._sharded._chunks, self._averages, strict=True)
            return {name: boxed for chunk, held in chunks for name, boxed in chunk.boxed(held).items()}
        named = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        return {
            canonical_name(name, param): BoxedTensor.like(param, average)
            for (name, param), average in zip(named, self._averages, strict=True)
        }


def _wide(value: torch.Tensor) -> torch.Tensor:
    """A copy in float32 at least."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
