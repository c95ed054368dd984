"""Linear layers whose weight gradient is written, or added, straight into its chunk, in the chunk's dtype.

Also from inside a compiled graph. So there is no gradient tensor beside the chunk, no copy into it, and a bfloat16
layer accumulates in float32.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cai_mesh.gradients.buffer import buffer_of


@torch.library.custom_op("cai_mesh::linear_backward", mutates_args=())
def _linear_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, call: int
) -> torch.Tensor:
    """Returns the gradient of x; adds that of the weight to the buffer of which `grad` is a view.

    The write is not part of the schema: a compiler would give the operator a copy of `grad` to write to. The result
    keeps the call in the graph; `call` keeps two equal calls from being made one. Writes commute.
    """
    buffer = buffer_of(grad)
    if buffer is None:
        raise RuntimeError("a weight gradient was to be written to a copy of its chunk; please report this")
    buffer.add_product(grad.storage_offset(), x, dy)
    return dy @ weight


@_linear_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, call: int) -> torch.Tensor:
    return dy @ weight


_CALLS = itertools.count()


def _new_call() -> int:
    """A number for every call in a traced graph; a trace keeps the ones it was made with (see `direct_linears`)."""
    return next(_CALLS)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, grad, call):
        ctx.save_for_backward(x, weight)
        ctx.call, ctx.has_bias = call, bias is not None
        ctx.grad = grad  # not saved: writing to it would count as a change
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        db = dy.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return _linear_backward(ctx.grad, x, weight, dy, ctx.call), None, db, None, None


def _has_hooks(weight: torch.Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` of x [..., in]; the gradient of weight [out, in] goes into its `GradBuffer`, if any.

    Differentiable once. Autocast, a weight that has no buffer or carries gradient hooks, and an x that needs no
    gradient take torch's own path.
    """
    grad = getattr(weight, "cai_grad", None)
    direct = grad is not None and torch.is_grad_enabled() and x.requires_grad and x.dim() > 1
    if not direct or torch.is_autocast_enabled(x.device.type) or _has_hooks(weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, grad, _new_call())


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return linear(input, self.weight, self.bias)


def direct_linears(model: nn.Module, params: Iterable[nn.Parameter]) -> None:
    """Let every plain `nn.Linear` below `model` whose weight is among `params` write its gradient into the chunk.

    Layers with a forward of their own, and weights that carry gradient hooks, stay as they are.
    """
    # here, because it imports the compiler, which importing us must not
    torch.compiler.assume_constant_result(_new_call)
    wanted = {id(p) for p in params}
    for module in model.modules():
        plain = type(module) is nn.Linear and "forward" not in module.__dict__
        if plain and id(module.weight) in wanted and not _has_hooks(module.weight):
            module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
