"""Parameters whose values and gradients may still be on their way: reading one waits for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves

from cai_gemini.chunk.given_back import GivenBack
from cai_mesh.errors import LayoutError, PlanError
from cai_mesh.gradients import (
    SHAPES,
    Place,
    backward_to_used,
    check_same_data,
    shown,
    use_flat,
    value_of,
    whole_of,
)
from cai_mesh.layout import record_of


class Keeper(Protocol):
    """Whoever steps a parameter and has its gradient."""

    def settle(self) -> None:
        """Return once the parameter has its value."""

    def gradient_of(self, index: int) -> torch.Tensor | None:
        """The gradient of the chunk's parameter `index`, complete, as a view of where it is."""

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Take another gradient for parameter `index`, or none."""

    def leaf(self, index: int) -> nn.Parameter:
        """The unsharded parameter that autograd accumulates into, where hooks belong."""
        ...


_GET, _SET = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__  # type: ignore[attr-defined]
_DELETE = torch.Tensor.grad.__delete__  # type: ignore[attr-defined]
_ABOUT = {
    getattr(torch.Tensor, name).__get__
    for name in (
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
} | {torch.Tensor.element_size, torch.Tensor.is_floating_point}


_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}

_FUSED = {torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_}
"""Steps of plain optimizers, which write to their first argument without counting a version."""


class KeptParameter(nn.Parameter):
    """A flat parameter of master weights: its step may run in the background and its gradient lives in a chunk.

    It is shown in the shape of the whole parameter. Every torch function on it waits until its value is there. `grad`
    waits for the copy from the device and is a view of the gradient itself: what is written there is what the optimizer
    steps with. Its dtype may be that of computation.
    """

    cai_keeper: Keeper
    cai_index: int
    cai_place: Callable[[], Place] | None = None
    """The place in the whole, where several ranks have parts of it."""
    cai_share: Callable[[torch.Tensor], torch.Tensor] | None = None
    """This rank's part of a whole gradient that a loop puts in place, where several ranks have parts of it."""
    cai_flat = False
    """Whether an optimizer steps it now, which sees it flat."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return a plain parameter of its values."""
        return nn.Parameter(whole_of(self), self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(whole_of(self), self.requires_grad)
        return memo[id(self)]

    def flat_values(self) -> torch.Tensor:
        self.cai_keeper.settle()
        return self

    def place_of_values(self) -> Place:
        if self.cai_place is not None:
            return self.cai_place()
        shape, slices = self.cai_keeper.leaf(self.cai_index).shape, record_of(self).slices
        low, high = slices[0].range if slices is not None else (0, shape.numel())
        return Place(shape, low, high, beyond=high - low < shape.numel())

    @classmethod
    def adopt(cls, param: nn.Parameter, keeper: Keeper, index: int) -> None:
        """Make `param` one of these, in place."""
        param.__class__ = cls
        param.cai_keeper, param.cai_index = keeper, index  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA and not args[0].cai_flat:
            return check_same_data(args[0], args[1])
        if func is torch.autograd.backward:
            return backward_to_used(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func == _GET:
                return args[0]._shown_gradient()
            if func == _SET:
                return args[0].cai_keeper.set_gradient(args[0].cai_index, args[0]._part_of(args[1]))
            if func in _HOOKS:
                return func(args[0].cai_keeper.leaf(args[0].cai_index), *args[1:], **kwargs)
            if func is torch.autograd.grad:
                raise PlanError(
                    "torch.autograd.grad was asked for the gradient of a parameter that is kept elsewhere",
                    cause="the forward used another tensor, which is brought for each use",
                    fix="call backward() and read .grad",
                )
            if func == _DELETE:
                return args[0].cai_keeper.set_gradient(args[0].cai_index, None)
            params = [value for value in tree_leaves((args, kwargs)) if isinstance(value, cls)]
            if func not in _ABOUT and func not in SHAPES:
                for value in params:
                    value.cai_keeper.settle()
            if func in _FUSED or func == _DATA:  # what is written to `data` counts no version either
                increment_version(args[0])
            if any(value.cai_flat for value in params):
                return func(*args, **kwargs)
            return value_of(args[0]) if func == _DATA else use_flat(func, args, kwargs, cls)

    def _shown_gradient(self) -> torch.Tensor | None:
        gradient = self.cai_keeper.gradient_of(self.cai_index)
        if gradient is None or isinstance(gradient, GivenBack) or self.cai_flat:
            return gradient
        return shown(gradient, self.place_of_values())

    def _part_of(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """What is kept of a gradient that a loop puts in place. Raises `LayoutError` for one of another shape."""
        if gradient is None or isinstance(gradient, GivenBack) or self.cai_flat:
            return gradient
        if self.cai_share is not None:
            return self.cai_share(gradient)
        shape = self.place_of_values().shape
        if gradient.shape != shape:
            raise LayoutError(
                "a gradient does not have the shape of its parameter",
                got=tuple(gradient.shape),
                expected=tuple(shape),
            )
        return gradient


class UsedParameters:
    """The `GradientKeeper` of weights on the device, for who meets them there (after an error in a backward).

    Their gradients are those of the parameters that are kept.
    """

    steps = fixed = True

    def __init__(self, keeper: Keeper):
        self._keeper = weakref.ref(keeper)

    def held(self, index: int) -> tuple[torch.Tensor, Place] | None:
        keeper = self._keeper()
        gradient = None if keeper is None else keeper.gradient_of(index)
        if keeper is None or gradient is None:
            return None
        return gradient, Place(keeper.leaf(index).shape, 0, gradient.numel())

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        keeper = self._keeper()
        if keeper is not None:
            keeper.set_gradient(index, gradient)

    def leaf(self, index: int) -> nn.Parameter:
        keeper = self._keeper()
        assert keeper is not None
        return keeper.leaf(index)

    def about_to_write(self, index: int) -> None:
        """Let writes to the weights on the device go with them."""
