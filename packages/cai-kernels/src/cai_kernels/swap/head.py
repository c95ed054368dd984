"""The output layer of a model that trains: it returns `Logits`, which know how they are formed and their loss taken.

They remember the weights, not the layer: what is asked of them later is as of the call. Only where weights are gathered
for a call of the layer (sharded parameters) is the layer called again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cai_kernels.backend import Backend, choose
from cai_kernels.errors import KernelError
from cai_kernels.linear_cross_entropy import LossProducts, linear_cross_entropy
from cai_kernels.swap.logits import Logits
from cai_kernels.swap.record import Swapped, taken
from cai_kernels.swap.structure import transformed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATHERING = ("cai_", "torch.distributed.fsdp", "torch.distributed._composable")
SMALL = 64 * 2**20  # bytes of logits that are formed before weights change, in case they are read later


@dataclass(frozen=True)
class Request:
    """A loss asked of the output layer: the arguments of `linear_cross_entropy` after the weight."""

    target: torch.Tensor
    options: dict[str, Any]


FORM = None  # asked of the output layer instead of a loss: logits


def swap_loss(model: nn.Module, record: Swapped, backend: Backend) -> None:
    """Let the output layer of `model` (its `get_output_embeddings()`) return `Logits` while it trains."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is None:
        return
    name = next((n for n, m in model.named_modules() if m is head), "")
    reason = taken(head)
    if reason is None and type(head) is not nn.Linear:
        reason = f"the output layer is a {type(head).__name__}, not an nn.Linear"
    if reason is not None:
        record.leave(name, "loss", reason)
        return

    def forward(self, input, *request):
        compiling, run = torch.compiler.is_compiling(), self.__dict__.get("run_products")
        if request and isinstance(request[0], Request):
            target, options = request[0].target, request[0].options | {"backend": backend}
            if run is not None and torch.is_grad_enabled() and not compiling:
                return run(LossProducts(target, **options), input)
            return linear_cross_entropy(input, self.weight, target, bias=self.bias, **options)
        if request or not self.training or compiling or not _may_wait(self, input, backend):
            return F.linear(input, self.weight, self.bias) if run is None else run(None, input)
        return _waiting(self, input, backend)

    forward.calls_run_products = True  # type: ignore[attr-defined]

    record.put(name, head, forward, "loss", "linear_cross_entropy")
    _watch_optimizers()


def _may_wait(head: nn.Module, hidden: Any, backend: Backend) -> bool:
    """Whether logits may be computed later: nobody watches the layer, and the kernel takes its tensors."""
    if not isinstance(hidden, torch.Tensor) or hidden.is_inference() or hidden.dim() == 0 or transformed():
        return False
    if torch.jit.is_tracing() or not all(map(gathers, _hooks(head))):
        return False
    weight, autocast = head.weight, torch.is_autocast_enabled(hidden.device.type)
    fits = autocast or weight.dtype == hidden.dtype
    # a tensor without values stands for a plain one: memory is planned with those
    plain = type(weight) in (torch.Tensor, nn.Parameter, FakeTensor) or _calls_again(head)
    known = DTYPES if choose(backend, hidden.device) == "triton" else (*DTYPES, torch.float64)
    return plain and fits and hidden.dtype in known and weight.dtype in known


def _hooks(head: nn.Module) -> Iterator[Any]:
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"):
        yield from getattr(head, f"_{kind}").values()
        yield from getattr(torch_modules, f"_global_{kind}").values()


def gathers(hook: Any) -> bool:
    """Whether a hook is one of sharded parameters: it gathers weights, and looks at no numbers."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(GATHERING)


def _calls_again(head: nn.Module) -> bool:
    """Whether weights are there, or gradients find their place, only when the layer itself is called."""
    return "run_products" in head.__dict__ or next(_hooks(head), None) is not None


# -- where logits come from --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """An output layer at one call.

    Args:
        head: the layer.
        tensors: its weight and bias then, with their versions; empty if the layer is called again.
        autocast: whether autocast was on, and its dtype.
        step: how many steps optimizers had made.
        backend: of the kernel.
    """

    head: nn.Module
    tensors: tuple[tuple[torch.Tensor | None, int], ...]
    autocast: tuple[bool, torch.dtype]
    step: int
    backend: Backend

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., V] for [..., D]."""
        self.check()
        with self._as_then(hidden):
            if not self.tensors:
                return self.head(hidden, FORM)
            return F.linear(hidden, *(t for t, _ in self.tensors))  # type: ignore[arg-type]

    def loss(self, hidden: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        self.check()
        with self._as_then(hidden):
            if not self.tensors:
                return self.head(hidden, Request(target, options))
            (weight, _), (bias, _) = self.tensors
            return linear_cross_entropy(hidden, weight, target, bias=bias, backend=self.backend, **options)  # type: ignore

    def _as_then(self, hidden: torch.Tensor) -> torch.autocast:
        enabled, dtype = self.autocast
        return torch.autocast(hidden.device.type, dtype, enabled)

    def check(self) -> None:
        """Raise `KernelError` if the weights have changed since."""
        changed = any(t is not None and t._version != version for t, version in self.tensors)
        if changed or (not self.tensors and self.step != _STEPS[0]):
            raise KernelError(
                "logits are read, for the first time, after the weights of the output layer have changed",
                expected="the first use of logits, or a loss of them, before the optimizer's step",
                fix="read them before the step, call logits.form() there, or swap without kind 'loss'",
            )


def _waiting(head: nn.Module, hidden: torch.Tensor, backend: Backend) -> Logits:
    weight, bias = head.weight, head.bias
    kind = hidden.device.type
    autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    tensors = ((weight, weight._version), (bias, 0 if bias is None else bias._version))  # type: ignore[union-attr]
    source = Source(head, () if _calls_again(head) else tensors, autocast, _STEPS[0], backend)  # type: ignore[arg-type]
    wanted = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)  # type: ignore[union-attr]
    logits = Logits(
        source,
        hidden,
        columns=head.out_features if not source.tensors else weight.shape[0],  # type: ignore[arg-type, index]
        dtype=autocast[1] if autocast[0] and hidden.dtype != torch.float64 else hidden.dtype,
        requires_grad=torch.is_grad_enabled() and bool(wanted),
    )
    if source.tensors:
        _WAITING[id(logits)] = logits
    return logits


# -- before weights change ---------------------------------------------------------------------------------------------

_WAITING: weakref.WeakValueDictionary[int, Logits] = weakref.WeakValueDictionary()
_STEPS = [0]


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Form small logits that are still held and whose weights this step changes."""
    if torch.compiler.is_compiling():
        return
    _STEPS[0] += 1
    held = [logits for logits in _WAITING.values() if logits.pending()]
    _WAITING.clear()
    changing = {id(p) for group in optimizer.param_groups for p in group["params"]} if held else set()
    for logits in held:
        if not any(id(t) in changing for t in _tensors(logits)):
            _WAITING[id(logits)] = logits
        elif logits.numel() * logits.element_size() <= SMALL:
            logits.form()


def _tensors(logits: Logits) -> Iterable[torch.Tensor | None]:
    return (t for t, _ in logits.source.tensors)
