"""An exponential moving average of weights, of which each rank keeps what it holds (Polyak and Juditsky, 1992)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cai_mesh.gradients import flat_of
from cai_mesh.layout import BoxedTensor, canonical_name
from cai_zero.replicated.chunks import Chunk
from cai_zero.replicated.masters import opened
from cai_zero.replicated.optimizer import ShardedOptimizer


class Ema:
    """average = decay * average + (1 - decay) * weights, after each optimizer step.

    In stages 0 to 2 of the optimizer's master weights, a shard a rank; in stage 3 and under offload of this rank's
    shards, where they are; of a plain model of its parameters. Averages are in float32 at least. Frozen parameters have
    none until they are unfrozen.

        ema = Ema(model, optimizer, decay=0.999)
        for batch in batches:
            ...
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
        with ema.applied():
            evaluate(model)

    Args:
        model: as `shard_module` or `offload` returned it, one over which an optimizer is sharded, or a plain one.
        optimizer: the one that `shard_optimizer` returned, for stages 0 to 2; others are not looked at.
        decay: the part of the average that a step keeps, between 0 and 1.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, decay: float = 0.999
    ):
        self.decay = decay
        self._sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        self._named = list(model.named_parameters())
        self._weights: list[torch.Tensor] = []
        self._averages: list[torch.Tensor] = []
        self._chunks: dict[int, Chunk] = {}
        self._join()
        self_ref = weakref.ref(self)

        def before_step(*_: Any) -> None:
            average = self_ref()
            if average is not None:
                average._join()

        register_optimizer_step_pre_hook(before_step)  # for good, as in `cai_zero.stage3.sharding`

    def _trained(self) -> list[torch.Tensor]:
        if self._sharded is not None:
            self._sharded.admit()
            self._chunks = {id(chunk.weights.flat): chunk for chunk in self._sharded.chunks}
            return [chunk.weights.flat for chunk in self._sharded.chunks]
        return [param for _, param in self._named if param.requires_grad]

    def _join(self) -> None:
        """Begin the average of what is trained from now on with its value: that was its average while it was frozen."""
        weight_ids = {id(weight) for weight in self._weights}
        for weight in self._trained():
            if id(weight) not in weight_ids:
                self._weights.append(weight)
                with self._opened(weight):
                    self._averages.append(_wide(weight))

    def _opened(self, weight: torch.Tensor) -> AbstractContextManager[None]:
        """Inside, a weight has its values."""
        return opened([self._chunks[id(weight)]] if id(weight) in self._chunks else [])

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of now into the average. Talks to nobody."""
        if self._sharded is not None:
            self._sharded.take_writes()
        for average, value in zip(self._averages, self._weights, strict=True):
            with self._opened(value):
                average.lerp_(flat_of(value).to(average.dtype), 1.0 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages for weights. Collective where weights are sharded."""
        before = []
        for value in self._weights:
            with self._opened(value):
                before.append(flat_of(value).clone())
        self._put(self._averages)
        try:
            yield
        finally:
            self._put(before)

    @torch.no_grad()
    def _put(self, values: list[torch.Tensor]) -> None:
        for value, weight in zip(values, self._weights, strict=True):
            with self._opened(weight):
                flat_of(weight).copy_(value)
        if self._sharded is not None:
            self._sharded.publish()

    def state_for_checkpoint(self) -> dict[str, BoxedTensor]:
        """The averages by canonical parameter name, for `cai_mesh.checkpoint` on any layout: views, loaded in place."""
        self._join()
        averages = {
            id(weight): average for weight, average in zip(self._weights, self._averages, strict=True)
        }
        if self._sharded is not None:
            boxes = (chunk.boxed(averages[id(chunk.weights.flat)]) for chunk in self._sharded.chunks)
            return {name: boxed for some in boxes for name, boxed in some.items()}
        named = [(canonical_name(n, p), p) for n, p in self._named if id(p) in averages]
        return {name: BoxedTensor.like(param, averages[id(param)]) for name, param in named}


def _wide(value: torch.Tensor) -> torch.Tensor:
    """A copy in float32 at least."""
    return flat_of(value).to(torch.promote_types(value.dtype, torch.float32), copy=True)
