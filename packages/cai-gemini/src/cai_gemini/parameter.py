"""Parameters whose values and gradients may still be on their way: reading one waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves


class Keeper(Protocol):
    """Whoever steps a parameter and has its gradient."""

    def settle(self) -> None:
        """Return once the parameter has its value."""

    def gradient_of(self, index: int) -> torch.Tensor | None:
        """The gradient of the chunk's parameter `index`, complete, as a view of where it is."""

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Take another gradient for parameter `index`, or none."""


_GET, _SET = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__  # type: ignore[attr-defined]
_DELETE = torch.Tensor.grad.__delete__  # type: ignore[attr-defined]
_ABOUT = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "layout",
        "is_meta",
        "is_cuda",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
    )
} | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
}


_FUSED = {torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_}
"""Steps of plain optimizers, which write to their first argument without counting a version."""


class KeptParameter(nn.Parameter):
    """A flat parameter of master weights: its step may run in the background and its gradient lives in a chunk.

    Every torch function on it waits until its value is there. `grad` waits for the copy from the device and is a view
    of the gradient itself: what is written there is what the optimizer steps with. Its dtype may be that of
    computation.
    """

    cai_keeper: Keeper
    cai_index: int

    @classmethod
    def adopt(cls, param: nn.Parameter, keeper: Keeper, index: int) -> None:
        """Make `param` one of these, in place."""
        param.__class__ = cls
        param.cai_keeper, param.cai_index = keeper, index  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func == _GET:
                return args[0].cai_keeper.gradient_of(args[0].cai_index)
            if func == _SET:
                return args[0].cai_keeper.set_gradient(args[0].cai_index, args[1])
            if func == _DELETE:
                return args[0].cai_keeper.set_gradient(args[0].cai_index, None)
            if func not in _ABOUT:
                for value in tree_leaves((args, kwargs)):
                    if isinstance(value, cls):
                        value.cai_keeper.settle()
            result = func(*args, **kwargs)
            if func in _FUSED:
                increment_version(args[0])
            return result
