"""Logits that are computed only when they are used; their cross-entropy never computes them all at once.

The output layer returns `Logits`: hidden states and the layer, with the shape of logits. What loss code does between
the layer and `F.cross_entropy` (a cast, a shift by one token, a flattening, a scale, a soft cap) is noted; the
cross-entropy then runs fused with the layer. Any other operation forms the logits and goes on with them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from cai_kernels.backend import Backend
from cai_kernels.linear_cross_entropy import LossProducts, linear_cross_entropy
from cai_kernels.swap.record import Swapped, taken


@dataclass(frozen=True)
class Request:
    """A loss asked of the output layer: the arguments of `linear_cross_entropy` after the weight."""

    target: torch.Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class Shaping:
    """What was done to the logits: `outer * tanh(inner * logits)` when capped, else `inner * logits`."""

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


class Logits(torch.Tensor):
    """[..., V] logits of a linear layer, not computed yet.

    Hooks on them are those of the logits once formed. If a loss is taken without, they are told when its backward
    begins, with the loss's gradient: what watches for a backward to start (sharded parameters do) sees it start.
    """

    head: nn.Module
    hidden: torch.Tensor
    shaping: Shaping
    formed: torch.Tensor | None
    hooks: OrderedDict[int, Callable]

    @staticmethod
    def __new__(
        cls, head: nn.Module, hidden: torch.Tensor, dtype: torch.dtype, shaping: Shaping = Shaping()
    ) -> Logits:
        weight: torch.Tensor = head.weight  # type: ignore[assignment]
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            (*hidden.shape[:-1], _columns(head)),
            dtype=dtype,
            device=hidden.device,
            requires_grad=hidden.requires_grad or weight.requires_grad,
        )
        self.head, self.hidden, self.shaping, self.formed = head, hidden, shaping, None
        self.hooks = OrderedDict()
        if self.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_lost)
        return self

    def watch(self, hook: Callable) -> RemovableHandle:
        """`Tensor.register_hook`."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def form(self) -> torch.Tensor:
        """The logits as a tensor: computed once, and again if that was under `no_grad` and gradients are needed."""
        wanted = torch.is_grad_enabled() and self.requires_grad
        if self.formed is None or (wanted and not self.formed.requires_grad):
            self.formed = self.shaping.apply(self.head(self.hidden, FORM).to(self.dtype))
            if self.formed.requires_grad:
                for hook in self.hooks.values():
                    self.formed.register_hook(hook)
        return self.formed

    def like(self, hidden: torch.Tensor | None = None, **changes: Any) -> Logits:
        """These logits with other hidden states, another dtype or another shape."""
        options = {"dtype": self.dtype, "shaping": self.shaping} | changes
        other = Logits(self.head, self.hidden if hidden is None else hidden, **options)
        other.hooks = self.hooks
        return other

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if func is torch.Tensor.register_hook:
            return first.watch(*args[1:], **kwargs)
        if func in _NOTED and type(first) is Logits and first.formed is None:
            noted = _NOTED[func](*args, **kwargs)
            if noted is not None:
                return noted
        args, kwargs = tree_map_only(Logits, Logits.form, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"{func} reached logits that are not formed yet, past torch's function protocol: call logits.form() "
            "first, or swap the model without kind 'loss'"
        )


FORM = None  # asked of the output layer instead of a loss: logits


def swap_loss(model: nn.Module, record: Swapped, backend: Backend) -> None:
    """Let the output layer of `model` (its `get_output_embeddings()`) return `Logits` while it trains."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is None:
        return
    name = next(n for n, m in model.named_modules() if m is head)
    reason = taken(head)
    if reason is None and type(head) is not nn.Linear:
        reason = f"the output layer is a {type(head).__name__}, not an nn.Linear"
    if reason is not None:
        record.leave(name, "loss", reason)
        return

    def forward(self, hidden, *request):
        compiling, run = torch.compiler.is_compiling(), self.__dict__.get("run_products")
        if request and isinstance(request[0], Request):
            target, options = request[0].target, request[0].options | {"backend": backend}
            if run is not None and torch.is_grad_enabled() and not compiling:
                return run(LossProducts(target, **options), hidden)
            return linear_cross_entropy(hidden, self.weight, target, bias=self.bias, **options)
        if request or not self.training or compiling:
            return F.linear(hidden, self.weight, self.bias) if run is None else run(None, hidden)
        return Logits(self, hidden, hidden.dtype)

    forward.calls_run_products = True  # type: ignore[attr-defined]

    record.put(name, head, forward, "loss", "linear_cross_entropy")


def _lost(gradient: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(
        "a gradient reached logits that were never formed (an autograd.Function took them as they are): call "
        "logits.form() first, or swap the model without kind 'loss'"
    )


def _columns(head: nn.Module) -> int:
    return head.out_features  # type: ignore[return-value]


# -- what is noted: functions of (logits, ...) that return logits again, or None where they must be formed ---------


def _cast(logits: Logits, dtype: torch.dtype) -> Logits:
    return logits.like(dtype=dtype)


def _to(logits: Logits, *args: Any, **kwargs: Any) -> Logits | None:
    asked = [*args, *kwargs.values()]
    if len(asked) == 1 and isinstance(asked[0], torch.dtype):
        return _cast(logits, asked[0])
    same = len(asked) == 1 and isinstance(asked[0], torch.device | str)
    return logits if same and torch.device(asked[0]) == logits.device else None


def _reshape(logits: Logits, *shape: Any) -> Logits | None:
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not all(isinstance(size, int) for size in sizes) or sizes[-1] not in (logits.shape[-1], -1):
        return None
    rows = logits.hidden.shape[:-1].numel()
    if sizes[-1] == -1 and math.prod(sizes[:-1]) != rows:
        return None
    return logits.like(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))


def _flatten(logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Logits | None:
    last = logits.dim() - 1
    if end_dim % logits.dim() == last:
        return None
    return logits.like(logits.hidden.flatten(start_dim, end_dim % logits.dim()))


def _slice(logits: Logits, index: Any) -> Logits | None:
    whole = index if isinstance(index, tuple) else (index,)
    if any(i is None for i in whole):
        return None
    if Ellipsis in whole:
        at = whole.index(Ellipsis)
        whole = (*whole[:at], *[slice(None)] * (logits.dim() - len(whole) + 1), *whole[at + 1 :])
    if len(whole) == logits.dim() and whole[-1] == slice(None):
        whole = whole[:-1]
    if len(whole) >= logits.dim() or not all(isinstance(i, (slice, int)) for i in whole):
        return None
    return logits.like(logits.hidden[whole])


def _scale(logits: Logits, factor: Any) -> Logits | None:
    return logits.like(shaping=logits.shaping.times(float(factor))) if _number(factor) else None


def _divide(logits: Logits, by: Any) -> Logits | None:
    return logits.like(shaping=logits.shaping.times(1 / by)) if _number(by) and by else None


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _tanh(logits: Logits) -> Logits | None:
    if logits.shaping.capped:
        return None
    return logits.like(shaping=replace(logits.shaping, capped=True))


def _cross_entropy(
    logits: Logits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """The loss fused with the layer; None if it needs all logits."""
    classes = logits.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    if not classes or weight is not None or size_average is not None or reduce is not None:
        return None
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    hidden, shaping = logits.hidden, logits.shaping
    factor = shaping.inner
    if shaping.capped:
        options["softcap"] = shaping.outer
        factor *= shaping.outer  # outer * tanh(logits * factor / outer)
    if factor != 1.0:
        hidden = hidden * factor
    loss = logits.head(hidden, Request(target, options)).to(logits.dtype)
    if loss.requires_grad:
        loss.register_hook(_teller(logits.hooks))
    return loss


def _teller(hooks: OrderedDict[int, Callable]) -> Callable[[torch.Tensor], None]:
    """Tells `hooks` that the backward of what was made of their logits has begun; holds no hidden states."""

    def tell(gradient: torch.Tensor) -> None:
        for hook in list(hooks.values()):
            hook(gradient)

    return tell


_NOTED: dict[Any, Callable] = {
    torch.Tensor.float: lambda logits: _cast(logits, torch.float32),
    torch.Tensor.double: lambda logits: _cast(logits, torch.float64),
    torch.Tensor.to: _to,
    torch.Tensor.contiguous: lambda logits: logits,
    torch.Tensor.view: _reshape,
    torch.Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    torch.Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    torch.Tensor.__getitem__: _slice,
    torch.Tensor.mul: _scale,
    torch.Tensor.__mul__: _scale,
    torch.Tensor.__rmul__: _scale,
    torch.mul: _scale,
    torch.Tensor.div: _divide,
    torch.Tensor.__truediv__: _divide,
    torch.div: _divide,
    torch.Tensor.tanh: _tanh,
    torch.tanh: _tanh,
    F.cross_entropy: _cross_entropy,
}
_ABOUT = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "device",
            "ndim",
            "requires_grad",
            "is_cuda",
            "layout",
            "is_leaf",
            "is_meta",
        )
    ),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point),
    torch.Tensor.__len__,
}
