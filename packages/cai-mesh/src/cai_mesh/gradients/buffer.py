"""Gradients of a chunk of parameters, accumulated where the collective reads them.

What writes there while backward runs is in `cai_mesh.gradients.linear`. Every other gradient arrives as `.grad` and is
moved by `take`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.gradients.gradient_views.parameters import raw_grad, set_raw_grad
from cai_mesh.layout.chunk import FlatChunk
from cai_mesh.protocols import LinearRule

_BUFFERS: weakref.WeakValueDictionary[int, GradBuffer] = weakref.WeakValueDictionary()
"""Buffers by storage: the op below sees a tensor, inside a compiled graph too, and must find whose memory it is."""


def buffer_of(view: torch.Tensor) -> GradBuffer | None:
    """The buffer whose memory a tensor views."""
    return _BUFFERS.get(view.untyped_storage()._cdata)


def accumulate_node(param: torch.Tensor) -> torch.autograd.graph.Node:
    """The autograd node that accumulates into a leaf's `.grad`. Keep it: torch holds it only weakly."""
    with torch.enable_grad():
        return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def has_hooks(weight: torch.Tensor) -> bool:
    """Whether somebody wants to see the weight's gradient as autograd hands it over."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


_LOOKED_AT = 200


def accumulates(node: torch.autograd.graph.Node) -> bool | None:
    """Whether the backward under way reaches a node; None for a leaf's in `torch.autograd.grad`, which returns them."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # what torch answers there
        return None


def leaves_out(first: torch.autograd.graph.Node) -> bool:
    """Whether the backward under way was told by `inputs` which leaves to reach, as far as nodes near `first` show."""
    nodes, visited = [first], {first}
    for node in nodes:
        following = [after for after, _ in node.next_functions if after is not None and after not in visited]
        if not all(map(accumulates, following)):
            return True
        if len(visited) > _LOOKED_AT:
            return False
        visited.update(following)
        nodes.extend(following)
    return False


class GradBuffer:
    """The gradients of one chunk: memory that comes with a backward and goes with its reduction.

    Each trainable parameter's `cai_grad` is its view of the buffer; linear layers write there.

    Attributes:
        deferred: the keeper of weight gradients that arrive now (None: they are made at once).
        arrived: the parameters that have had a gradient since their owner last cleared this, by place in the chunk.

    Args:
        chunk: the layout of the parameters in the memory.
        params: the leaf parameters autograd sees, in the chunk's order.
        dtype: the gradients' dtype.
        device: the buffer's device.
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
        self.deferred: Deferred | None = None
        self.arrived: set[int] = set()
        self._kept: list[_Kept] = []
        self._before_open = before_open
        self._unwritten: set[int] = set()
        self._nodes: list[torch.autograd.graph.Node | None] = [None] * len(self.params)
        self.tensor = torch.empty(chunk.numel, dtype=dtype, device=device)
        self.views = chunk.views(self.tensor)
        # for graphs, which keep them from forward to backward: of versions of their own, so that no write counts
        self._handles = [view.data for view in self.views]
        self._index = {slot.offset: i for i, slot in enumerate(chunk.slots) if slot.numel}
        self._free()
        self._token = torch.zeros(1, device=device)  # see `cai_mesh.gradients.linear`
        self.watch()

    def watch(self) -> None:
        """Take the gradients of parameters that require them, also of those that have not until now."""
        for i, (param, handle) in enumerate(zip(self.params, self._handles, strict=True)):
            if param.requires_grad and self._nodes[i] is None:
                self._nodes[i] = accumulate_node(param)
                param.cai_grad = handle  # type: ignore[attr-defined]
                param.cai_token = self._token  # type: ignore[attr-defined]

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

    def add(
        self, offset: int, rule: LinearRule, operands: tuple[torch.Tensor, ...], *, borrowed: bool = False
    ) -> None:
        """Add a weight gradient at `offset`, now or when it is flushed, unless this backward leaves it out.

        Args:
            rule, operands: the rule that makes it, and the tensors it makes it of.
            borrowed: the operands' memory is used again as soon as this returns.
        """
        index = self._index[offset]
        node = self._nodes[index]
        if node is None or not self.takes(offset):
            return
        if self.deferred is None:
            self.write(index, rule, operands)
            return
        # not the graph behind them
        saved_operands = tuple(t.clone() if borrowed else t.detach() for t in operands)
        product = _Kept(self, index, rule, saved_operands)
        self._kept.append(product)
        self.deferred.keep(product)

    def takes(self, offset: int) -> bool | None:
        """Whether a weight gradient at `offset` is for this buffer in the backward under way; None: for the caller."""
        node = self._nodes[self._index[offset]]
        return False if node is None else accumulates(node)

    @torch.no_grad()
    def write(self, index: int, rule: LinearRule, operands: tuple[torch.Tensor, ...]) -> None:
        """Make a weight gradient in the chunk: over what is there where it is the first, else added to it."""
        self.open()
        is_first = index in self._unwritten
        self._unwritten.discard(index)
        self.arrived.add(index)
        rule.write_weight_grad(operands, self.views[index], fresh=is_first)

    def _flush(self) -> None:
        while self._kept:
            self._kept.pop(0).flush()

    def _waiting(self) -> set[int]:
        return {product.index for product in self._kept if product.operands is not None}

    @property
    def has_gradients(self) -> bool:
        """Whether anything has arrived that `take` would return."""
        return self.is_open or bool(self._waiting()) or bool(self._late())

    @property
    def written(self) -> set[int]:
        """Return the parameters with a gradient that `take` would return, by their place in the chunk."""
        late = set(self._late()) | self._waiting()
        return late | (set(range(len(self.params))) - self._unwritten if self.is_open else set())

    @torch.no_grad()
    def take(self) -> torch.Tensor:
        """The gradients, [chunk.numel]: what was written here plus every `.grad`, which are dropped; zero elsewhere."""
        self.open()
        self._flush()
        self.collect()
        empty = [self.views[i] for i in sorted(self._unwritten)]
        if empty:
            torch._foreach_zero_(empty)
        self._unwritten = set()
        return self.tensor

    @torch.no_grad()
    def collect(self) -> None:
        """Add every `.grad` to the chunk, and drop it. Weight gradients that wait go on waiting."""
        late = self._late()
        if not late:
            return
        self.open()
        self.arrived.update(late)
        unwritten = [i for i in late if i in self._unwritten]
        if unwritten:
            torch._foreach_copy_([self.views[i] for i in unwritten], [self._grad(i) for i in unwritten])
        again = [i for i in late if i not in self._unwritten]
        if again:
            grads = [self._grad(i).to(self.tensor.dtype) for i in again]
            torch._foreach_add_([self.views[i] for i in again], grads)
        self._unwritten.difference_update(late)
        for i in late:
            set_raw_grad(self.params[i], None)

    @torch.no_grad()
    def put(self, gradients: torch.Tensor) -> None:
        """Hold these, [chunk.numel], as though they had arrived; `arrived` stays as it is."""
        self.open()
        self.tensor.copy_(gradients)
        self._unwritten = set()

    def _grad(self, index: int) -> torch.Tensor:
        grad = raw_grad(self.params[index])
        assert grad is not None
        return grad.to_dense() if grad.is_sparse else grad

    def _late(self) -> list[int]:
        """The parameters whose gradients autograd has accumulated itself."""
        return [i for i, p in enumerate(self.params) if raw_grad(p) is not None]

    def drop(self, index: int) -> None:
        """Forget what has arrived of one gradient and was not taken by a reduction yet."""
        set_raw_grad(self.params[index], None)
        for product in self._kept:
            if product.index == index:
                product.operands = None
        self.arrived.discard(index)
        if self.is_open:
            self._unwritten.add(index)

    def forget(self) -> None:
        """Forget all that has arrived, also what autograd has accumulated itself."""
        self.close()
        self.arrived.clear()
        for param in self.params:
            set_raw_grad(param, None)

    def close(self) -> None:
        """Free the memory, and drop what still waits. The caller has seen to it that nothing still reads it."""
        for product in self._kept:
            product.operands = None
        self._kept.clear()
        if self.is_open:
            self.tensor.untyped_storage().resize_(0)
            self.is_open = False

    def hand_over(self) -> torch.Tensor:
        """The memory with the gradients in it, [chunk.numel], for the caller to keep; the buffer is closed."""
        gradients = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)
        gradients.set_(self.tensor.untyped_storage(), 0, self.tensor.shape)
        replacement = torch.empty_like(self.tensor)
        self.tensor.data = replacement
        for view, handle, other in zip(self.views, self._handles, self.chunk.views(replacement), strict=True):
            view.data = handle.data = other
        self.is_open = False
        self._free()
        return gradients


@dataclass(eq=False)
class _Kept:
    """A weight gradient whose product is still to be made.

    Args:
        buffer, index: the buffer it goes to, and its place there.
        rule: the rule that makes it.
        operands: the tensors it is made of; None once it has been.
    """

    buffer: GradBuffer
    index: int
    rule: LinearRule
    operands: tuple[torch.Tensor, ...] | None

    def flush(self) -> None:
        operands, self.operands = self.operands, None
        if operands is not None:
            self.buffer.write(self.index, self.rule, operands)


class Deferred:
    """Weight gradients that `defer` has kept."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def keep(self, kept: _Kept) -> None:
        self._kept.append(kept)

    def flush(self) -> None:
        """Make the products that have not been made yet and add them to their chunks."""
        while self._kept:
            self._kept.pop(0).flush()


@contextlib.contextmanager
def defer(params: Iterable[nn.Parameter]) -> Iterator[Deferred]:
    """Backwards inside keep the weight gradients of linear layers for later: `flush` what this yields.

    Only gradients that go into a `GradBuffer` can wait; all others come with the backward. Whoever takes a chunk's
    gradients gets all of them: what still waits is made then. What is kept are the operands of the products, for a
    plain layer its input and the gradient of its output; a compiled graph lends them, so there they are copied.
    """
    views = (getattr(p, "cai_grad", None) for p in params)
    buffers = {buffer for view in views if view is not None if (buffer := buffer_of(view)) is not None}
    before = {buffer: buffer.deferred for buffer in buffers}
    deferred = Deferred()
    for buffer in buffers:
        buffer.deferred = deferred
    try:
        yield deferred
    finally:
        for buffer, other in before.items():
            buffer.deferred = other


def check_no_gradients(params: Iterable[nn.Parameter]) -> None:
    """Raise `PlanError` where a gradient is already waiting: it would be lost or counted twice."""
    if any(raw_grad(p) is not None for p in params):
        raise PlanError("a parameter already has a gradient", fix="call zero_grad() before sharding")
