"""Notes on logits that are not formed: functions that give logits, a loss, or None to form them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from cai_kernels.swap.logits import Logits


def note(func: Callable, logits: Logits, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of `func(logits, *args, **kwargs)` without logits; None if it needs them."""
    noting = _NOTED.get(func)
    if noting is None:
        return None
    try:
        inspect.signature(noting).bind(logits, *args, **kwargs)
    except TypeError:  # arguments that are not known here
        return None
    return noting(logits, *args, **kwargs)


def _cast(logits: Logits, dtype: torch.dtype) -> Logits | None:
    if not dtype.is_floating_point:
        return None
    return logits if dtype == logits.dtype else logits.like(dtype=dtype)


def _to(logits: Logits, *args: Any, **kwargs: Any) -> Logits | None:
    arguments = [*args, *kwargs.values()]
    if len(arguments) == 1 and isinstance(arguments[0], torch.dtype):
        return _cast(logits, arguments[0])
    same = len(arguments) == 1 and isinstance(arguments[0], torch.device | str)
    return logits if same and torch.device(arguments[0]) == logits.device else None


def _contiguous(logits: Logits) -> Logits:
    return logits if logits.sketch.is_contiguous() else logits.like()


def _view(logits: Logits, *shape: Any) -> Logits | None:
    return _in_shape(logits, shape, torch.Tensor.view)


def _reshape(logits: Logits, *shape: Any) -> Logits | None:
    return _in_shape(logits, shape, torch.Tensor.reshape)


def _in_shape(logits: Logits, shape: tuple, view: Callable) -> Logits | None:
    one = len(shape) == 1 and isinstance(shape[0], (tuple, list))
    sizes = tuple(shape[0]) if one else shape
    if (
        not sizes
        or not all(isinstance(size, int) for size in sizes)
        or sizes[-1] not in (logits.shape[-1], -1)
    ):
        return None
    rows = logits.hidden.shape[:-1].numel()
    if sizes[-1] == -1 and math.prod(sizes[:-1]) != rows:
        return None
    if 0 in logits.hidden.shape:
        return None
    hidden = logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1])
    return logits.seen_as(hidden, lambda t: view(t, sizes))


def _flatten(logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Logits | None:
    dims = logits.dim()
    if not (-dims <= start_dim < dims and -dims <= end_dim < dims - 1) or end_dim == -1:
        return None
    start, end = start_dim % dims, end_dim % dims
    return logits.seen_as(logits.hidden.flatten(start, end), lambda t: t.flatten(start, end))


def _slice(logits: Logits, index: Any) -> Logits | None:
    indices = index if isinstance(index, tuple) else (index,)
    if not all(i is Ellipsis or isinstance(i, slice) or type(i) is int for i in indices):
        return None
    full_index = indices
    places = [at for at, i in enumerate(full_index) if i is Ellipsis]
    if len(places) == 1:
        at = places[0]
        full_index = (
            *full_index[:at],
            *[slice(None)] * (logits.dim() - len(full_index) + 1),
            *full_index[at + 1 :],
        )
    if len(full_index) == logits.dim() and full_index[-1] == slice(None):
        full_index = full_index[:-1]
    if len(places) > 1 or len(full_index) >= logits.dim() or not all(_of_numbers(i) for i in full_index):
        return None
    return logits.seen_as(logits.hidden[full_index], lambda t: t[indices])


def _index_select(logits: Logits, dim: int, index: torch.Tensor) -> Logits | None:
    """Rows by their numbers: a copy of them, of which torch makes no view either."""
    if dim != 0 or logits.dim() != 2:
        return None
    return logits.like(logits.hidden.index_select(0, index))


def _of_numbers(index: Any) -> bool:
    parts = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
    return all(part is None or type(part) is int for part in parts)


def _scale(logits: Logits, factor: Any) -> Logits | None:
    return logits.like(shaping=logits.shaping.times(float(factor))) if _number(factor) else None


def _divide(logits: Logits, by: Any) -> Logits | None:
    return logits.like(shaping=logits.shaping.times(1 / by)) if _number(by) and by else None


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


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
    classes = logits.dim() == 2 and target.dim() == 1 and target.dtype == torch.int64
    if not classes or weight is not None or size_average is not None or reduce is not None:
        return None
    if reduction not in ("mean", "sum", "none") or target.shape[0] != logits.shape[0] or not target.numel():
        return None
    cap = logits.shaping.as_cap()
    if cap is None or logits.source.is_part or (cap[0] != 1.0 and logits.source.head.bias is not None):
        return None
    factor, softcap = cap
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    if softcap is not None:
        options["softcap"] = softcap
    logits.check()
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
        hidden = logits.hidden if factor == 1.0 else logits.hidden * factor
        loss = logits.source.loss(hidden, target, options).to(_dtype_of_loss(logits))
    logits.tell(loss)
    return loss


def _dtype_of_loss(logits: Logits) -> torch.dtype:
    """That of the logits; float32 where autocast takes the cross-entropy in it."""
    if torch.is_autocast_enabled(logits.device.type):
        return torch.promote_types(logits.dtype, torch.float32)
    return logits.dtype


_NOTED: dict[Any, Callable] = {
    torch.Tensor.is_leaf.__get__: lambda logits: not logits.requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.float: lambda logits: _cast(logits, torch.float32),
    torch.Tensor.double: lambda logits: _cast(logits, torch.float64),
    torch.Tensor.to: _to,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.view: _view,
    torch.Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    torch.Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    torch.Tensor.__getitem__: _slice,
    torch.Tensor.index_select: _index_select,
    torch.index_select: _index_select,
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
