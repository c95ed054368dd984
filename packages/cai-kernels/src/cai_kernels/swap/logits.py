"""Logits that are computed only when they are used; their cross-entropy never computes them all at once.

The output layer returns `Logits`: hidden states and where logits come from, with the shape of logits. What loss code
does between the layer and `F.cross_entropy` (a cast, a shift by one token, a flattening, a scale, a soft cap) is noted;
the cross-entropy then runs fused with the layer. Any other operation forms the logits and goes on with them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from cai_kernels.errors import KernelError
from cai_kernels.swap.hooks import gathers
from cai_kernels.swap.source import Question, Source

Note = Callable[[Callable, "Logits", tuple, dict[str, Any]], Any]
"""Takes a function, logits and its further arguments; gives its result without logits, or None if it needs them."""


@dataclass(frozen=True)
class Shaping:
    """The function applied to the logits: `outer * tanh(inner * logits)` when capped, else `inner * logits`."""

    inner: float = 1.0
    capped: bool = False
    outer: float = 1.0

    def times(self, factor: float) -> Shaping:
        if self.capped:
            return replace(self, outer=self.outer * factor)
        return replace(self, inner=self.inner * factor)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits if self.inner == 1.0 else logits * self.inner
        if self.capped:
            logits = torch.tanh(logits)
        return logits if self.outer == 1.0 else logits * self.outer

    def as_cap(self) -> tuple[float, float | None] | None:
        """(factor, cap) of `cap * tanh(factor * logits / cap)`, or of factor * logits; None: it is neither."""
        if not self.capped:
            return self.inner, None
        return (self.inner * self.outer, self.outer) if self.outer > 0 else None


class Logits(torch.Tensor):
    """[..., V] logits of a linear layer, not computed yet.

    A view of logits (a slice, another shape) keeps its base: formed, it is a view of the formed base, so what is
    written into one is seen in the other. Hooks on them are those of the logits once formed. Only hooks of sharded
    parameters, which watch for a backward to start, form nothing: they are told when the backward of a loss begins,
    with its gradient.
    """

    source: Source
    hidden: torch.Tensor
    version: int
    grad_enabled: bool
    shaping: Shaping
    sketch: torch.Tensor
    formed: torch.Tensor | None
    base: Logits | None
    view_of: Callable[[torch.Tensor], torch.Tensor] | None
    hooks: OrderedDict[int, Callable]
    note: Note

    @staticmethod
    def __new__(
        cls,
        source: Source,
        hidden: torch.Tensor,
        *,
        columns: int,
        dtype: torch.dtype,
        requires_grad: bool,
        note: Note,
        shaping: Shaping = Shaping(),
    ) -> Logits:
        shape = (*hidden.shape[:-1], columns)
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=hidden.device, requires_grad=requires_grad
        )
        self.source, self.hidden, self.shaping, self.note = source, hidden, shaping, note
        self.version, self.grad_enabled = hidden._version, requires_grad
        self.sketch = torch.empty(shape, dtype=dtype, device="meta")
        self.formed = self.base = self.view_of = None
        self.hooks = OrderedDict()
        if requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_lost)
        return self

    def pending(self) -> bool:
        """Whether nobody has formed these logits, or those they are a view of."""
        return self.formed is None and (self.base is None or self.base.pending())

    def form(self) -> torch.Tensor:
        """The logits as a tensor, computed once."""
        if self.formed is None:
            with torch.set_grad_enabled(self.grad_enabled):
                if self.base is not None and self.view_of is not None:
                    self.formed = self.view_of(self.base.form())
                else:
                    self.check()
                    self.formed = self.shaping.apply(self.source.logits(self.hidden).to(self.dtype))
            if self.base is None and self.formed.requires_grad:
                for hook in self.hooks.values():
                    self.formed.register_hook(hook)
        return self.formed

    def answer(self, question: Question) -> torch.Tensor | None:
        """What a question about the output layer gives, these logits still not formed; None if it needs them.

        It is asked of a layer that `defer_logits` has changed, while its weights are there, with the input of these
        logits, by which their factor is multiplied. Hooks on them hear when its backward begins.
        """
        cap = self.shaping.as_cap()
        if cap is None or (cap[0] != 1.0 and self.source.head.bias is not None) or not self.pending():
            return None
        self.check()
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad):
            hidden = self.hidden if cap[0] == 1.0 else self.hidden * cap[0]
            answer = self.source.answer(hidden, question, cap[1])
        self.tell(answer)
        return answer

    def tell(self, outcome: torch.Tensor) -> None:
        """Let hooks on these logits hear when the backward of what was made of them begins."""
        if outcome.requires_grad and self.hooks:
            outcome.register_hook(_teller(self.hooks))

    def check(self) -> None:
        """Raise `KernelError` if logits can no longer be computed as they were."""
        self.source.check()
        if self.hidden._version != self.version:
            raise KernelError(
                "logits are read, for the first time, after the hidden states they are made of were written to",
                fix="read them before, call logits.form() there, or swap without kind 'loss'",
            )

    def like(self, hidden: torch.Tensor | None = None, **changes: Any) -> Logits:
        """These logits with other hidden states, another dtype or shaping, independent of these."""
        self.check()
        options = {"dtype": self.dtype, "note": self.note, "shaping": self.shaping} | changes
        hidden = self.hidden if hidden is None else hidden
        grad_enabled = self.requires_grad and torch.is_grad_enabled()
        other = Logits(self.source, hidden, columns=self.shape[-1], requires_grad=grad_enabled, **options)
        other.hooks = self.hooks
        return other

    def seen_as(self, hidden: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> Logits:
        """The logits that `view` makes of these, with its hidden states: a view of these where torch makes one."""
        other = self.like(hidden)
        sketch = view(self.sketch)
        if sketch.untyped_storage()._cdata == self.sketch.untyped_storage()._cdata:
            other.base, other.view_of, other.sketch = self, view, sketch
        return other

    def watch(self, hook: Callable) -> RemovableHandle:
        """`Tensor.register_hook`; `hooks` keeps those of sharded parameters."""
        if not gathers(hook):
            return self.form().register_hook(hook)
        if self.formed is not None and self.formed.requires_grad:
            return self.formed.register_hook(hook)
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if type(first) is Logits:
            if func is torch.Tensor.register_hook:
                return first.watch(*args[1:], **kwargs)
            if first.pending():
                if func in _ABOUT:
                    with torch._C.DisableTorchFunctionSubclass():
                        return func(*args, **kwargs)
                result = first.note(func, first, args[1:], kwargs)
                if result is not None:
                    return result
        args, kwargs = tree_map_only(Logits, Logits.form, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"{func} reached logits that are not formed yet, past torch's function protocol: call logits.form() "
            "first, or swap the model without kind 'loss'"
        )


def _teller(hooks: OrderedDict[int, Callable]) -> Callable[[torch.Tensor], None]:
    """Tells `hooks` that the backward of what was made of their logits has begun; holds no hidden states."""

    def tell(gradient: torch.Tensor) -> None:
        for hook in list(hooks.values()):
            hook(gradient)

    return tell


def _lost(gradient: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(
        "a gradient reached logits that were never formed (an autograd.Function took them as they are): call "
        "logits.form() first, or swap the model without kind 'loss'"
    )


_ABOUT = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_meta")
    ),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point),
    *(torch.Tensor.__len__, torch.Tensor.element_size),
}
