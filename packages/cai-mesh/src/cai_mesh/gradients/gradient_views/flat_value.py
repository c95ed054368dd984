"""Values of flat parameters: shown in the shape of the whole parameter, whatever part of it is here.

Outside a graph what is made of a flat parameter is a `ShardGradient`: the whole, of which a part is here. In a graph,
where a loss reads weights, elementwise operators run on the part and sums are those of the whole; the gradient of the
part is then that of the whole loss, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves, tree_map

from cai_mesh.errors import PlanError
from cai_mesh.gradients.gradient_views.flat_use import LOOKS, check_flat_use
from cai_mesh.gradients.gradient_views.place import Place
from cai_mesh.gradients.gradient_views.shard_gradient import ShardGradient


class Flat(Protocol):
    """A parameter that is kept flat, or a rank's part of one."""

    def flat_values(self) -> torch.Tensor:
        """This rank's part, 1-d, as a leaf of the graph: the parameter itself, once its values are there."""
        ...

    def place_of_values(self) -> Place:
        """The part's place in the whole parameter."""
        ...


SHAPES = {getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim")} | {
    *(getattr(torch.Tensor, name) for name in ("dim", "ndimension", "size", "numel", "nelement", "stride")),
    *(torch.Tensor.__len__, torch.numel),
}
"""What tells of a parameter's shape: that of the whole is told."""

_OWN = {
    "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "__hash__", "is_shared",
    "share_memory_", "backward", "__set__", "__delete__", "_is_view",
    "is_complex", "is_floating_point", "is_tensor", "is_conj", "is_neg", "is_inference", "is_signed", "result_type",
}  # fmt: skip
_IN_GRAPHS = {
    "pow", "square", "abs", "absolute", "mul", "multiply", "add", "sub", "subtract", "rsub", "div", "true_divide",
    "neg", "negative", "exp", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "clamp", "clip", "tanh", "sigmoid", "relu",
    "softplus", "logsigmoid", "sin", "cos", "maximum", "minimum", "where", "clone", "to", "float", "double", "half",
    "bfloat16", "__pow__", "__rpow__", "__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__rsub__", "__div__",
    "__rdiv__", "__truediv__", "__rtruediv__", "__neg__", "__abs__", "smooth_l1_loss", "huber_loss", "lerp",
}  # fmt: skip
_REDUCED = {"sum", "mean", "norm", "vector_norm", "mse_loss", "l1_loss"}
_OUT_OF_GRAPHS = {
    "detach", "sign", "isnan", "isfinite", "isinf", "eq", "ne", "gt", "ge", "lt", "le", "__eq__", "__ne__", "__gt__",
    "__ge__", "__lt__", "__le__", "equal", "allclose", "isclose", "zeros_like", "ones_like", "empty_like", "full_like",
    "rand_like", "randn_like", "item", "tolist", "numpy", "__repr__", "__float__", "__int__", "__bool__", "__format__",
    "__array__", "count_nonzero", "any", "all",
}  # fmt: skip


def use_flat(func: Any, args: Any, kwargs: Any, flat: type) -> Any:
    """Call `func` where flat parameters stand for whole ones; `flat` is the class of theirs.

    Raises `PlanError` for what would need the whole parameter in a graph.
    """
    first = args[0] if args else None
    if TracingContext.try_get() is not None:  # a compiler looks at its inputs, as they are
        return func(*args, **kwargs)
    if func in SHAPES:
        return func(_blank(first.place_of_values().shape), *args[1:], **kwargs)
    if func in LOOKS or getattr(func, "__name__", "") in _OWN:
        return func(*args, **kwargs)
    check_flat_use(func, args, kwargs, flat)
    params = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, flat)}
    if _builds_graph(func, params.values()) and not all(
        param.place_of_values().alone for param in params.values()
    ):
        return _in_graph(func, args, kwargs, flat)
    lowered = {key: _whole_value(func, param) for key, param in params.items()}
    output = func(*_replaced(args, lowered), **_replaced(kwargs, lowered))
    return next((param for key, param in params.items() if output is lowered[key]), output)


def value_of(param: Any) -> torch.Tensor:
    """The values of a flat parameter outside a graph; what is written there is written to the parameter."""
    return _outside(param)


def _outside(value: Any) -> torch.Tensor:
    """A value outside a graph, whose writes count as those to the value itself."""
    local, place = value.flat_values().detach(), value.place_of_values()
    return local.view(place.shape) if place.alone else ShardGradient(local, place)


def whole_of(param: Any) -> torch.Tensor:
    """A copy of all values of a flat parameter. Collective where several ranks have parts."""
    with torch._C.DisableTorchFunctionSubclass():
        value = value_of(param)
        return value.whole().clone() if isinstance(value, ShardGradient) else value.clone()


def _blank(shape: torch.Size) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _replaced(values: Any, by_id: dict[int, Any]) -> Any:
    return tree_map(lambda value: by_id.get(id(value), value), values)


def _builds_graph(func: Any, params: Any) -> bool:
    """Whether the result would be differentiable; what `torch.nn.init` does is not."""
    name, room = getattr(func, "__name__", ""), getattr(func, "__module__", "") or ""
    outside = (
        name in _OUT_OF_GRAPHS or room == "torch.nn.init" or "no_grad" in getattr(func, "__qualname__", "")
    )
    return torch.is_grad_enabled() and any(param.requires_grad for param in params) and not outside


def _whole_value(func: Any, param: Any) -> torch.Tensor:
    """A parameter as a tensor of the whole shape; one of which all is here keeps its graph."""
    place = param.place_of_values()
    if not place.alone or not torch.is_grad_enabled() or getattr(func, "__name__", "") == "detach":
        return _outside(param)
    return param.flat_values().view(place.shape)


# -- in a graph ------------------------------------------------------------------------------------------------------


class FlatValue(torch.Tensor):
    """What a graph has of flat parameters: 1-d, shown in the shape of the whole."""

    cai_place: Place

    def flat_values(self) -> torch.Tensor:
        return self

    def place_of_values(self) -> Place:
        return self.cai_place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in SHAPES:
                return func(_blank(args[0].cai_place.shape), *args[1:], **kwargs)
            name = getattr(func, "__name__", "")
            if func in LOOKS or name in _OWN:
                return func(*args, **kwargs)
            if name in _OUT_OF_GRAPHS or not torch.is_grad_enabled():
                leaves = tree_leaves((args, kwargs))
                by_id = {id(value): _outside(value) for value in leaves if hasattr(value, "place_of_values")}
                return func(*_replaced(args, by_id), **_replaced(kwargs, by_id))
            return _in_graph(func, args, kwargs, FlatValue)


class _Total(torch.autograd.Function):
    """The sum over all ranks of what each has, whose gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, place: Place) -> torch.Tensor:
        return place.combine(value.clone())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def _refused(func: Any, place: Place) -> PlanError:
    return PlanError(
        "a parameter that is sharded or offloaded was used outside its block",
        got=f"{getattr(func, '__name__', func)} on a part of {tuple(place.shape)}, in a graph",
        cause="weights are whole only while their block's forward runs; in a loss outside, elementwise operators, "
        "sums, means and norms of all of a weight are those of the whole",
        fix="torch.no_grad() where no gradient is needed; else use the weight in its block's forward, or keep "
        "parameters unsharded (shard_optimizer, stages 0 to 2)",
    )


def _in_graph(func: Any, args: Any, kwargs: Any, flat: type) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    flats = [tensor for tensor in tensors if hasattr(tensor, "place_of_values")]
    place, name = flats[0].place_of_values(), getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return func(*args, **kwargs)  # torch itself raises for a leaf
    lowered: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if hasattr(tensor, "place_of_values") and tensor.place_of_values() == place:
            lowered[id(tensor)] = tensor.flat_values()
        elif isinstance(tensor, ShardGradient) and tensor.place == place:
            lowered[id(tensor)] = tensor.part
        elif (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.shape == place.shape
            and tensor.dim()
        ):
            lowered[id(tensor)] = tensor.flatten()[place.low : place.high]
        elif hasattr(tensor, "place_of_values") or tensor.dim():
            raise _refused(func, place)
    args, kwargs = _replaced(args, lowered), _replaced(kwargs, lowered)
    if name in _REDUCED:
        return _reduced(name, place, args, kwargs, lambda: _refused(func, place))
    if name not in _IN_GRAPHS or kwargs.get("out") is not None:
        raise _refused(func, place)
    value = func(*args, **kwargs).as_subclass(FlatValue)
    value.cai_place = place
    return value


def _reduced(
    name: str, place: Place, args: Any, kwargs: Any, refused: Callable[[], PlanError]
) -> torch.Tensor:
    """Sums, means and norms over all of a parameter."""
    first, rest = args[0], list(args[1:])
    if name in ("mse_loss", "l1_loss"):
        if len(rest) != 1 or kwargs.get("reduction", "mean") not in ("mean", "sum"):
            raise refused()
        distance = (first - rest[0]).square() if name == "mse_loss" else (first - rest[0]).abs()
        total = _Total.apply(distance.sum(), place)
        return total if kwargs.get("reduction") == "sum" else total / place.shape.numel()
    if name in ("sum", "mean"):
        if rest or set(kwargs) - {"dtype"}:
            raise refused()
        total = _Total.apply(first.sum(**kwargs), place)
        return total if name == "sum" else total / place.shape.numel()
    order = rest.pop(0) if rest else kwargs.pop("p", kwargs.pop("ord", 2))
    if rest or any(value is not None and value is not False for value in kwargs.values()):
        raise refused()
    order = 2 if order in ("fro", None) else order
    if not isinstance(order, (int, float)) or not 0 < order < float("inf"):
        raise refused()
    powers = first.square() if order == 2 else first.abs().pow(order)
    total = _Total.apply(powers.sum(), place)
    return total.sqrt() if order == 2 else total.pow(1 / order)
