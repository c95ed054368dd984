"""The output layer of a model that trains: it returns `Logits`, which know how they are formed and their loss taken.

They remember the weights, not the layer: what is asked of them later is as of the call. Only where weights are gathered
for a call of the layer (sharded parameters) is the layer called again.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cai_kernels.backend import Backend, choose
from cai_kernels.linear_cross_entropy import LossProducts, linear_cross_entropy
from cai_kernels.swap.hooks import gathers, hooks_of
from cai_kernels.swap.logits import Logits
from cai_kernels.swap.notes import note
from cai_kernels.swap.record import Swapped, taken
from cai_kernels.swap.source import FORM, STEPS, Request, Source
from cai_kernels.swap.structure import transformed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = 64 * 2**20  # bytes of logits that are formed before weights change, in case they are read later


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


def defer_logits(model: nn.Module, *, backend: Backend = "auto") -> str | None:
    """Let an output layer that somebody else computes return `Logits` while it trains, as `swap` lets one of torch.

    For a layer whose columns are a part of a vocabulary: nothing here takes their cross-entropy, but
    `Logits.answer` asks the layer for what they are wanted for, with its input and before they exist. Any other use
    forms them.

    Args:
        model: a model with `get_output_embeddings()`, an `nn.Linear` that has `run_products`: a method that computes
            it (of None: by its own products).
        backend: as `swap` has it.

    Returns None, or the reason why the layer stays as it is.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if type(head) is not nn.Linear:
        return f"the output layer is a {type(head).__name__}, not an nn.Linear"
    if "run_products" not in head.__dict__:
        return "the output layer is computed by torch"

    def forward(self, input, *request):
        if request and request[0] is not FORM:
            return request[0](self, input)
        if (
            request
            or not self.training
            or torch.compiler.is_compiling()
            or not _may_wait(self, input, backend)
        ):
            return self.run_products(None, input)
        return _waiting(self, input, backend, is_part=True)

    forward.calls_run_products = True  # type: ignore[attr-defined]
    head.forward = types.MethodType(forward, head)  # type: ignore[method-assign]
    return None


def _may_wait(head: nn.Module, hidden: Any, backend: Backend) -> bool:
    """Whether logits may be computed later: nobody watches the layer, and the kernel takes its tensors."""
    if not isinstance(hidden, torch.Tensor) or hidden.is_inference() or hidden.dim() == 0 or transformed():
        return False
    if torch.jit.is_tracing() or not all(map(gathers, hooks_of(head))):
        return False
    weight, autocast = head.weight, torch.is_autocast_enabled(hidden.device.type)
    fits = autocast or weight.dtype == hidden.dtype
    plain = _is_plain(type(weight)) or _calls_again(head)
    dtypes = DTYPES if choose(backend, hidden.device) == "triton" else (*DTYPES, torch.float64)
    return plain and fits and hidden.dtype in dtypes and weight.dtype in dtypes


def _is_plain(kind: type) -> bool:
    """Whether operators treat a weight of this class as torch's own.

    A tensor without values stands for a plain one: memory is planned with those.
    """
    if not issubclass(kind, nn.Parameter):
        return kind in (torch.Tensor, FakeTensor)
    hooks = ("__torch_function__", "__torch_dispatch__")
    return all(getattr(kind, hook) is getattr(nn.Parameter, hook) for hook in hooks)


def _calls_again(head: nn.Module) -> bool:
    """Whether weights are there, or gradients find their place, only when the layer itself is called."""
    return "run_products" in head.__dict__ or next(hooks_of(head), None) is not None


def _waiting(head: nn.Module, hidden: torch.Tensor, backend: Backend, *, is_part: bool = False) -> Logits:
    weight, bias = head.weight, head.bias
    kind = hidden.device.type
    autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    tensors = ((weight, weight._version), (bias, 0 if bias is None else bias._version))  # type: ignore[union-attr]
    source = Source(head, () if _calls_again(head) else tensors, autocast, STEPS[0], backend, is_part)  # type: ignore[arg-type]
    needs_gradient = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)  # type: ignore[union-attr]
    logits = Logits(
        source,
        hidden,
        columns=weight.shape[0] if source.tensors or is_part else head.out_features,  # type: ignore[arg-type, index]
        dtype=autocast[1] if autocast[0] and hidden.dtype != torch.float64 else hidden.dtype,
        requires_grad=torch.is_grad_enabled() and bool(needs_gradient),
        note=note,
    )
    if source.tensors:
        _WAITING[id(logits)] = logits
    return logits


# -- before weights change ---------------------------------------------------------------------------------------------

_WAITING: weakref.WeakValueDictionary[int, Logits] = weakref.WeakValueDictionary()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Form small logits that are still held and whose weights this step changes."""
    if torch.compiler.is_compiling():
        return
    STEPS[0] += 1
    pending_logits = [logits for logits in _WAITING.values() if logits.pending()]
    _WAITING.clear()
    changing = (
        {id(p) for group in optimizer.param_groups for p in group["params"]} if pending_logits else set()
    )
    for logits in pending_logits:
        if not any(id(t) in changing for t in _tensors(logits)):
            _WAITING[id(logits)] = logits
        elif logits.numel() * logits.element_size() <= SMALL:
            logits.form()


def _tensors(logits: Logits) -> Iterable[torch.Tensor | None]:
    return (t for t, _ in logits.source.tensors)
