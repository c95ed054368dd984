"""The `.grad` of a parameter on one stage of a pipeline: a plain tensor, of which no norm of the model can be made.

A loop that puts the norms of several parameters together would have the norm of one stage, and each stage would clip by
its own. One parameter's norm is right, and so is every other operator.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from cai_mesh.errors import LayoutError


def _named(*names: str) -> set[Any]:
    owners = (torch, torch.Tensor, torch.linalg)
    return {getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)}


_SINGLE = _named("vector_norm", "norm", "sum", "max", "amax", "dot", "vdot", "inner")
_TOGETHER = _named("cat", "concat", "concatenate", "stack", "hstack")
_TOTALS = {torch._foreach_norm, torch._amp_foreach_non_finite_check_and_unscale_}
_STILL = _named(
    "abs", "absolute", "square", "pow", "__pow__", "detach", "clone", "to", "float", "double", "flatten", "ravel",
    "reshape", "view", "contiguous",
)  # fmt: skip
_STILL.add(torch.Tensor.data.__get__)  # type: ignore[attr-defined]
_PRODUCTS = _named("mul", "multiply", "__mul__", "__rmul__")


def refuse() -> NoReturn:
    """Raise `LayoutError`: other stages have the rest."""
    raise LayoutError(
        "a norm or sum was asked for of gradients that other ranks hold more of",
        cause="pipeline stages divide the model: over the parameters of one, it would be that of one stage "
        "(torch's clip_grad_norm_ and GradScaler, or a loop of one's own)",
        fix="cai_mesh.clip_grad_norm_(model.parameters(), max_norm, mesh) with the whole mesh counts all stages, as "
        "cai_mesh.gradients.grad_norm and cai_zero.LossScale do",
    )


class StageGradient(torch.Tensor):
    """The gradient of one stage's parameter; writing to it writes to the gradient.

    Raises `LayoutError` where it would be put together with others.
    """

    cai_many = False
    """Whether it is several gradients, one after the other."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TOTALS:
            refuse()
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
        if not isinstance(output, torch.Tensor):
            return output
        marked = [leaf for leaf in tree_leaves(args) if isinstance(leaf, StageGradient)]
        many = any(leaf.cai_many for leaf in marked)
        if func in _SINGLE and not output.dim():
            if many:
                refuse()
            return output.as_subclass(StageValue)
        together, alone = func in _TOGETHER, func in _STILL and args[0] is marked[0]
        if together or alone or (func in _PRODUCTS and args[0] is args[1]):
            output = output.as_subclass(StageGradient)
            output.cai_many = many or (together and len(marked) > 1)
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class StageValue(torch.Tensor):
    """The norm or a sum of one parameter's gradient. Raises `LayoutError` where it meets that of another."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, StageValue)]
        if len(values) > 1 or func in _TOGETHER:
            refuse()
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
        if func is torch.Tensor.item and isinstance(output, float):
            return StageNumber(output)
        scalar = isinstance(output, torch.Tensor) and not output.dim() and output.is_floating_point()
        return output.as_subclass(StageValue) if scalar else output

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class StageNumber(float):
    """The same as a number, of which a loop that adds up `grad.norm().item() ** 2` would make a stage's norm."""

    def _with(self, other: Any, value: Any) -> Any:
        if isinstance(other, StageNumber):
            refuse()
        return StageNumber(value) if isinstance(value, float) else value

    def __add__(self, other: Any) -> Any:
        return self._with(other, float.__add__(self, other))

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return StageNumber(float(self) * other) if isinstance(other, float | int) else NotImplemented

    __rmul__ = __mul__

    def __pow__(self, other: Any, *_: Any) -> Any:
        return self._with(None, float.__pow__(self, other))

    def __reduce__(self) -> Any:
        return float, (float(self),)
