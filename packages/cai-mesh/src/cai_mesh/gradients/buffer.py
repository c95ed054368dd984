"""Gradients of a chunk of parameters, accumulated where the collective reads them.

What writes there while backward runs is in `cai_mesh.gradients.linear`. Every other gradient arrives as `.grad` and is
moved by `take`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout.chunk import FlatChunk

_BUFFERS: weakref.WeakValueDictionary[int, GradBuffer] = weakref.WeakValueDictionary()
"""By storage: the op below sees a tensor, inside a compiled graph too, and must find whose memory it is."""


def buffer_of(view: torch.Tensor) -> GradBuffer | None:
    """The buffer whose memory a tensor views."""
    return _BUFFERS.get(view.untyped_storage()._cdata)


def accumulate_node(param: torch.Tensor) -> torch.autograd.graph.Node:
    """The autograd node that accumulates into a leaf's `.grad`. Keep it: torch holds it only weakly."""
    with torch.enable_grad():
        return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class GradBuffer:
    """The gradients of one chunk: memory that comes with a backward and goes with its reduction.

    Each trainable parameter's `cai_grad` is its view of the buffer; `linear` writes there.

    Args:
        chunk: what lies where.
        params: the leaf parameters autograd sees, in the chunk's order.
        dtype: of the gradients.
        device: of the buffer.
        before_open: called before the memory is taken, so that an owner can bound how much is in flight.
    """

    def __init__(
        self,
        chunk: FlatChunk,
        params: Sequence[nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        *,
        before_open: Callable[[], None] = lambda: None,
    ):
        self.chunk, self.params = chunk, list(params)
        self.is_open = False
        self._before_open = before_open
        self._unwritten: set[int] = set()
        self._nodes = [accumulate_node(p) if p.requires_grad else None for p in self.params]
        self.tensor = torch.empty(chunk.numel, dtype=dtype, device=device)
        self.views = chunk.views(self.tensor)
        self._index = {slot.offset: i for i, slot in enumerate(chunk.slots) if slot.numel}
        self._free()
        for param, view in zip(self.params, self.views, strict=True):
            if param.requires_grad:
                param.cai_grad = view  # type: ignore[attr-defined]

    def _free(self) -> None:
        storage = self.tensor.untyped_storage()
        storage.resize_(0)
        _BUFFERS[storage._cdata] = self

    def open(self) -> None:
        """Take the memory, if it is not there already; every gradient is then still to be written."""
        if self.is_open:
            return
        self._before_open()
        self.tensor.untyped_storage().resize_(self.tensor.numel() * self.tensor.element_size())
        self.chunk.clear_padding(self.tensor)
        self._unwritten = set(range(len(self.params)))
        self.is_open = True

    def add_product(self, offset: int, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Add `dy[T, out]ᵀ @ x[T, in]` to the gradient that lies at `offset`, unless this backward leaves it out."""
        index = self._index[offset]
        node = self._nodes[index]
        if node is None or not torch._C._will_engine_execute_node(node):
            return
        self.open()
        fresh = index in self._unwritten
        self._unwritten.discard(index)
        _product(self.views[index], x.flatten(0, -2), dy.flatten(0, -2), fresh=fresh)

    @property
    def has_gradients(self) -> bool:
        """Whether anything has arrived that `take` would return."""
        return self.is_open or any(p.grad is not None for p in self.params)

    @property
    def written(self) -> set[int]:
        """Which parameters have a gradient that `take` would return, by their place in the chunk."""
        late = {i for i, p in enumerate(self.params) if p.grad is not None}
        return late | (set(range(len(self.params))) - self._unwritten if self.is_open else set())

    @torch.no_grad()
    def take(self) -> torch.Tensor:
        """The gradients, [chunk.numel]: what was written here plus every `.grad`, which are dropped; zero elsewhere."""
        self.open()
        late = [i for i, p in enumerate(self.params) if p.grad is not None]
        fresh = [i for i in late if i in self._unwritten]
        empty = [self.views[i] for i in sorted(self._unwritten.difference(late))]
        if empty:
            torch._foreach_zero_(empty)
        if fresh:
            torch._foreach_copy_([self.views[i] for i in fresh], [self._grad(i) for i in fresh])
        again = [i for i in late if i not in self._unwritten]
        if again:
            grads = [self._grad(i).to(self.tensor.dtype) for i in again]
            torch._foreach_add_([self.views[i] for i in again], grads)
        self._unwritten = set()
        for i in late:
            self.params[i].grad = None
        return self.tensor

    def _grad(self, index: int) -> torch.Tensor:
        grad = self.params[index].grad
        assert grad is not None
        return grad.to_dense() if grad.is_sparse else grad

    def close(self) -> None:
        """Free the memory. The caller has seen to it that nothing on the device still reads it."""
        if self.is_open:
            self.tensor.untyped_storage().resize_(0)
            self.is_open = False

    def hand_over(self) -> torch.Tensor:
        """The memory with the gradients in it, [chunk.numel], for the caller to keep; the buffer is closed."""
        kept = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)
        kept.set_(self.tensor.untyped_storage(), 0, self.tensor.shape)
        fresh = torch.empty_like(self.tensor)
        self.tensor.data = fresh
        for view, other in zip(self.views, self.chunk.views(fresh), strict=True):
            view.data = other
        self.is_open = False
        self._free()
        return kept


def _product(grad: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, *, fresh: bool) -> None:
    if grad.dtype == dy.dtype:
        torch.mm(dy.t(), x, out=grad) if fresh else grad.addmm_(dy.t(), x)
    elif grad.is_cuda and grad.dtype == torch.float32:
        if fresh:
            torch.mm(dy.t(), x, out_dtype=torch.float32, out=grad)
        else:
            torch.addmm(grad, dy.t(), x, out_dtype=torch.float32, out=grad)
    elif fresh:
        grad.copy_(dy.t() @ x)
    else:
        grad.add_(dy.t() @ x)


def check_no_gradients(params: Iterable[nn.Parameter]) -> None:
    """Raise `PlanError` where a gradient is already waiting: it would be lost or counted twice."""
    if any(p.grad is not None for p in params):
        raise PlanError("a parameter already has a gradient", fix="call zero_grad() before sharding")
