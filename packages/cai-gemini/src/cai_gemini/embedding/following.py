"""Finding the optimizer of a cached parameter, and the rows of its state."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from cai_gemini.embedding.rows import Pair, Rows
from cai_gemini.embedding.slots import SlotMap
from cai_mesh.comm import SideStream
from cai_mesh.errors import PlanError

STATE = "state."
"""Prefix of the pairs that hold optimizer state."""


class Follower:
    """Meets the torch optimizer that steps a cache at its first step, and gives its state rows in host memory.

    torch calls a hook before the step of every optimizer; this one looks whether the cache is among its parameters.

    Args:
        weight: the cache, [slots, dim].
        rows: receives a pair for every row-wise state tensor.
        slots: the map from rows to slots.
        stream: the stream on which `slots` is kept.
    """

    def __init__(self, weight: nn.Parameter, rows: Rows, slots: SlotMap, stream: SideStream):
        self._weight, self._rows, self._map, self._stream = weight, rows, slots, stream
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._others: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        me = weakref.ref(self)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            follower = me()
            if follower is not None and follower.meet(optimizer):
                follower.order_gradient(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def meet(self, optimizer: Optimizer) -> bool:
        """Follow `optimizer` if it steps the cache; returns whether it does.

        Raises `PlanError` when another optimizer that is still alive does, or when its state cannot follow rows.
        """
        current = self._optimizer() if self._optimizer is not None else None
        if current is optimizer:
            return True
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._others.get(optimizer) == size:
            return False
        groups = [
            group for group in optimizer.param_groups if any(p is self._weight for p in group["params"])
        ]
        if not groups:
            self._others[optimizer] = size
            return False
        if current is not None:
            raise PlanError(
                "two optimizers step one cached embedding",
                got=f"{type(current).__name__} and {type(optimizer).__name__}",
                fix="let one of them have it, and delete an optimizer that is no longer used",
            )
        if groups[0].get("momentum"):
            raise PlanError(
                "momentum moves every row at every step, cached or not",
                got=f"{type(optimizer).__name__}(momentum={groups[0]['momentum']})",
                expected="an optimizer that changes only the rows of the batch: SGD without momentum, Adagrad, "
                "SparseAdam, RowwiseAdagrad",
            )
        for name in [name for name in self._rows.pairs if name.startswith(STATE)]:
            del self._rows.pairs[name]  # of an optimizer that is gone
        self._adopt(optimizer, initial=True)
        self._optimizer = weakref.ref(optimizer)
        return True

    def refresh(self) -> None:
        """Give host memory to state that appeared in a step."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None:
            self._adopt(optimizer, initial=False)

    @torch.no_grad()
    def order_gradient(self, optimizer: Optimizer) -> None:
        """Add up the gradients of repeated rows, on the CPU, in the order in which a plain table would.

        Optimizers but SGD begin with `coalesce`, whose order of sums depends on the order of indices; rows are in
        another order than their slots.
        """
        gradient = self._weight.grad
        if (
            gradient is None
            or not gradient.is_sparse
            or gradient.is_cuda
            or isinstance(optimizer, torch.optim.SGD)
        ):
            return
        rows = self._map.row_of[gradient._indices()]
        shape = (self._map.rows, *gradient.shape[1:])
        summed = torch.sparse_coo_tensor(rows, gradient._values(), shape, check_invariants=False).coalesce()
        slots = self._map.slot_of[summed.indices()].long()
        self._weight.grad = torch.sparse_coo_tensor(
            slots, summed.values(), gradient.shape, check_invariants=False
        )

    def _adopt(self, optimizer: Optimizer, *, initial: bool) -> None:
        if self._weight not in optimizer.state:
            return
        for key, value in optimizer.state[self._weight].items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue
            pair = self._rows.pairs.get(STATE + key)
            if pair is None:
                self._rows.pairs[STATE + key] = Pair(self._host(key, value, initial), value)
            elif pair.cache is not value:
                raise PlanError(
                    f"optimizer state {key!r} of a cached embedding was replaced",
                    cause="optimizer.load_state_dict after a step, or an optimizer that does not update in place",
                    fix="save with embedding.optimizer_state and restore with embedding.load_optimizer_state",
                )

    def _host(self, key: str, value: torch.Tensor, initial: bool) -> torch.Tensor:
        """Make the host rows of a state tensor, all at the value an unused row has.

        initial: the optimizer meets the cache now, so its state is what it starts with.
        """
        if value.is_sparse or value.shape[0] != self._weight.shape[0]:
            raise PlanError(
                f"optimizer state {key!r} of a cached embedding does not follow rows",
                got=f"{'sparse ' if value.is_sparse else ''}shape {tuple(value.shape)}",
                expected=f"{self._weight.shape[0]} rows, as the cache has",
            )
        self._stream.join()
        idle = self._map.held[: self._map.slots] == 0
        if not initial and bool(value[idle].any()):
            raise PlanError(
                f"optimizer state {key!r} of a cached embedding starts neither at zero nor before the first step",
                fix="use an optimizer that makes its state when it is built, or starts it at zero",
            )
        start = value[0].cpu() if initial else torch.zeros(value.shape[1:], dtype=value.dtype)
        if initial and not bool((value == value[:1]).all()):
            raise PlanError(
                f"optimizer state {key!r} of a cached embedding does not say which rows it is of",
                cause="optimizer.load_state_dict restored what the cache held in another run",
                fix="save with embedding.optimizer_state and restore with embedding.load_optimizer_state",
            )
        host = torch.empty(self._map.rows, *value.shape[1:], dtype=value.dtype)
        return host.copy_(start)


def make_state(optimizer: Optimizer, weight: nn.Parameter) -> None:
    """Let an optimizer make the state of `weight` that it would make at its first step, changing no value.

    The optimizer steps once on an empty sparse gradient while all other gradients are put aside; counters go back.
    """
    if optimizer.state.get(weight):
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in params]
    for p in params:
        p.grad = None
    weight.grad = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=weight.device),
        torch.empty(0, *weight.shape[1:], dtype=weight.dtype, device=weight.device),
        weight.shape,
        check_invariants=False,
    )
    optimizer.step()
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    state = optimizer.state.get(weight, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            value.zero_()
        elif isinstance(value, int | float):
            state[key] = type(value)(0)
