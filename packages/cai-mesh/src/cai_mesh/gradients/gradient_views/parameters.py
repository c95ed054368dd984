"""Parameters whose `.grad` is what a loop expects, wherever the gradient really is.

A chunk's gradients are written to its buffer and reduced from there; autograd's own `.grad` holds one only on its way.
A `ShownParameter` gives whoever reads, writes, replaces or clears `param.grad` what its keeper has. Autograd, which
does not ask Python, sees the plain field: `raw_grad` and `set_raw_grad` are that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch._guards import TracingContext

from cai_mesh.errors import LayoutError, PlanError
from cai_mesh.gradients.gradient_views.backward_inputs import backward_to_used
from cai_mesh.gradients.gradient_views.flat_value import use_flat, value_of, whole_of
from cai_mesh.gradients.gradient_views.place import Place
from cai_mesh.gradients.gradient_views.shard_gradient import ShardGradient, shown
from cai_mesh.layout.chunk import moved


class GradientKeeper(Protocol):
    """Whoever has the gradients of some parameters.

    Attributes:
        steps: whether the parameters are stepped there, and so by no other optimizer.
        fixed: (optional) whether they are views of memory that is filled anew for each use, and must stay there.
    """

    steps: bool

    def held(self, index: int) -> tuple[torch.Tensor, Place] | None:
        """This rank's part, 1-d, of the reduced gradient of parameter `index`, and where in it that lies.

        None where no rank has a gradient. Collective where gradients are still to be reduced.
        """

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Take another gradient for parameter `index`, or none."""

    def leaf(self, index: int) -> nn.Parameter:
        """The parameter that autograd accumulates into, where hooks belong."""
        ...

    def about_to_write(self, index: int) -> None:
        """Somebody asked for the memory of parameter `index`, past every version counter."""

    def place(self, index: int) -> Place:
        """The place of this rank's part of parameter `index`, and of its gradient, in the whole."""
        ...


_FIELD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data


def is_kept(param: torch.Tensor) -> bool:
    """Whether a parameter is stepped through a keeper: sharded, offloaded, or to be."""
    keeper = getattr(param, "cai_keeper", None)
    return keeper is not None and getattr(keeper, "steps", True)


def raw_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that autograd has accumulated in the parameter itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return _FIELD.__get__(param)


def set_raw_grad(param: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Put a gradient, or none, where autograd accumulates."""
    with torch._C.DisableTorchFunctionSubclass():
        _FIELD.__set__(param, gradient)


def set_raw_data(param: torch.Tensor, tensor: torch.Tensor) -> None:
    """Put another tensor, of any shape, where a parameter has its values."""
    _DATA.__set__(param, tensor)


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def _asks_torch() -> bool:
    """Whether torch itself is asking: a hook within a backward, or a compiler that looks at its inputs."""
    return in_backward() or TracingContext.try_get() is not None


class ShownParameter(nn.Parameter):
    """A parameter whose `.grad` its keeper answers for. Within a backward it is autograd's own, as hooks expect.

    Operators treat it as any parameter: it has no torch function of its own. A copy of one is a plain parameter.
    """

    cai_keeper: GradientKeeper | None = None
    cai_index: int = 0

    @classmethod
    def adopt(cls, param: nn.Parameter, keeper: GradientKeeper, index: int) -> None:
        """Make `param` one of these, in place. One of another class of its own stays what it is."""
        if type(param) in (nn.Parameter, ShownParameter, ShardParameter):
            param.__class__ = cls
            param.cai_keeper, param.cai_index = keeper, index

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        if self.cai_keeper is None or _asks_torch():
            return raw_grad(self)
        entry = self.cai_keeper.held(self.cai_index)
        return None if entry is None else shown(*entry)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if self.cai_keeper is None or _asks_torch():
            set_raw_grad(self, gradient)
        else:
            self.cai_keeper.set_gradient(self.cai_index, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Register a hook as torch does; it is given this rank's gradient before it is reduced."""
        return torch.Tensor.register_hook(self._leaf(), hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Register a hook as torch does; it is given a parameter with this rank's gradient before it is reduced."""
        return torch.Tensor.register_post_accumulate_grad_hook(self._leaf(), hook)

    def _leaf(self) -> nn.Parameter:
        return self if self.cai_keeper is None else self.cai_keeper.leaf(self.cai_index)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        if self.cai_keeper is not None and not _asks_torch():
            self.cai_keeper.about_to_write(self.cai_index)
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        current = _DATA.__get__(self)
        if getattr(self.cai_keeper, "axes", None) and value.shape != current.shape:
            raise LayoutError(
                "a parameter that is cut over ranks was given values of another shape",
                got=tuple(value.shape),
                expected=tuple(current.shape),
                fix="resize the model first, then parallelize it",
            )
        if getattr(self.cai_keeper, "fixed", False) and (
            value.data_ptr() != current.data_ptr() or value.dtype != current.dtype
        ):
            raise moved("that a module uses now")
        _DATA.__set__(self, value)


class ShardParameter(ShownParameter):
    """A shard of a parameter, 1-d, in whose place another is used.

    It is shown in the shape of the whole, as a DTensor is; raises `PlanError` where what is away would be missed.
    """

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(whole_of(self), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return a plain parameter of the whole values. Collective."""
        return nn.Parameter(whole_of(self), self.requires_grad).__reduce_ex__(protocol)

    def flat_values(self) -> torch.Tensor:
        return self

    def place_of_values(self) -> Place:
        assert self.cai_keeper is not None
        return self.cai_keeper.place(self.cai_index)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        if self.cai_keeper is None or _asks_torch():
            return _DATA.__get__(self)
        self.cai_keeper.about_to_write(self.cai_index)
        with torch._C.DisableTorchFunctionSubclass():
            return value_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.cai_keeper is None:
            _DATA.__set__(self, value)
        else:
            check_same_data(self, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.backward:
            return backward_to_used(*args, **kwargs)
        if func is torch.autograd.grad:
            raise PlanError(
                "torch.autograd.grad was asked for the gradient of a parameter that is a shard",
                cause="the forward used the unsharded parameter, which is gathered for each use",
                fix="call backward() and read .grad, or keep parameters unsharded (shard_optimizer, stages 0 to 2)",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return use_flat(func, args, kwargs or {}, cls)


def flat_of(param: torch.Tensor) -> torch.Tensor:
    """The values of a parameter that are here, outside a graph, flat where they are kept so; writes count."""
    with torch._C.DisableTorchFunctionSubclass():
        return (param.flat_values() if hasattr(param, "flat_values") else param).detach()


def check_same_data(param: torch.Tensor, value: torch.Tensor) -> None:
    """Raise `PlanError` where another tensor is put in the `data` of a flat parameter: nobody would look there."""
    local = value.part if isinstance(value, ShardGradient) else value
    flat = flat_of(param)
    if local.data_ptr() != flat.data_ptr() or (local.dtype, local.numel()) != (flat.dtype, flat.numel()):
        raise PlanError(
            "another tensor was put in the data of a parameter that is kept flat",
            got=f"{tuple(value.shape)}, {value.dtype} on {value.device}",
            cause="`param.data = ...`, model.to, .half or .cuda after the model was sharded or offloaded; its values "
            "are a part of a chunk, which would not follow",
            fix="param.data.copy_(...) writes there; move and cast the model before",
        )


def local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a parameter's gradient, or all of it, as a plain tensor."""
    if isinstance(param, ShownParameter) and param.cai_keeper is not None and not in_backward():
        entry = param.cai_keeper.held(param.cai_index)
        return None if entry is None else entry[0]
    grad = param.grad
    if isinstance(grad, ShardGradient):
        return grad.part
    if grad is not None and hasattr(param, "flat_values"):
        return grad.view(-1)
    return grad.to_local() if grad is not None and hasattr(grad, "to_local") else grad


def hide(params: Iterable[nn.Parameter]) -> None:
    """Make parameters plain ones with nothing but autograd's `.grad`: what optimizers see."""
    for param in params:
        if isinstance(param, ShownParameter):
            param.cai_shown, param.__class__ = type(param), nn.Parameter
        elif hasattr(param, "cai_flat"):  # of a residency
            param.cai_flat = True


def show(params: Iterable[nn.Parameter]) -> None:
    """Let parameters that were hidden show their gradients again."""
    for param in params:
        if type(param) is nn.Parameter and hasattr(param, "cai_shown"):
            param.__class__ = param.cai_shown
        elif hasattr(param, "cai_flat"):
            param.cai_flat = False


@contextlib.contextmanager
def plain(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, parameters are hidden."""
    param_list = list(params)
    hide(param_list)
    try:
        yield
    finally:
        show(param_list)
