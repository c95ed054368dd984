"""torch's attention with its operators fastest first, around modules whose code calls it.

A module is found by its forward's code: that, a function it calls, or one those call, names torch's
`scaled_dot_product_attention`. Around the forward torch tries its operators in another order; which of them may run,
and an order that other code has set, stay as they are. The order sits on each module, not on the model, so that a
forward run again in a backward (recompute) sees it too.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from cai_kernels.attention.choice import SDPA, order
from cai_kernels.backend import Backend
from cai_kernels.ops import constant_in_graphs
from cai_kernels.swap.record import Swapped, taken

DEPTH = 2  # calls between a forward and torch's attention
# torch's own order: flash, efficient, math, cuDNN, overrideable. On Hopper torch itself puts cuDNN first, as we would,
# once attention has run there.
TORCHS = (1, 2, 0, 3, 4)
KERNEL = "attention by torch, fastest first"


def swap_attention(model: nn.Module, record: Swapped, backend: Backend) -> None:
    """Set our order of operators around the forward of every module that calls torch's attention itself."""
    if backend == "reference":
        return
    around: dict[
        Callable, Callable
    ] = {}  # one function for modules that share a forward: they share compiled code too
    calls: dict[Hashable, bool] = {}  # hundreds of modules share a few forwards
    for name, module in model.named_modules():
        kind = _kind(module)
        if kind not in calls:
            calls[kind] = calls_attention(module)
        if not calls[kind]:
            continue
        swapped_forward = record.forward_of(module)
        reason = None if swapped_forward is not None else taken(module)
        if reason is not None:
            record.leave(name, "attention", reason)
            continue
        inner = swapped_forward if swapped_forward is not None else type(module).forward
        if inner not in around:
            around[inner] = _ordered(inner)
        record.put(name, module, around[inner], "attention", KERNEL)


def _ordered(inner: Callable) -> Callable:
    """`inner` with torch's operators in our order, while its module trains on a GPU.

    Outside training the order stays: cuDNN makes a plan for every new shape, and decoding has a new one every token.
    """

    @functools.wraps(inner)
    def forward(self, *args, **kwargs):
        first = _first_tensor(args, kwargs) if self.training else None
        backend_order = None if first is None else wanted_order(first.device)
        if backend_order is None or not _untouched():
            return inner(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            if not _all_allowed():
                return inner(self, *args, **kwargs)
            with sdpa_kernel(backend_order, set_priority=True):
                return inner(self, *args, **kwargs)
        # as `sdpa_kernel(set_priority=True)`, at a fiftieth of its cost and with no operator switched on or off
        before = torch._C._get_sdp_priority_order()
        ours = [int(b) for b in backend_order]
        torch._C._set_sdp_priority_order(ours + [b for b in before if b not in ours])
        try:
            return inner(self, *args, **kwargs)
        finally:
            torch._C._set_sdp_priority_order(before)

    forward.__name__ = "forward"  # the name under which pickle looks a bound method up
    return forward


def wanted_order(device: torch.device) -> list[SDPBackend] | None:
    """Our order of operators on a device; None where torch's order is as good."""
    return order(device) if device.type == "cuda" else None


@constant_in_graphs
def _untouched() -> bool:
    """Whether the order of operators is torch's default."""
    return tuple(torch._C._get_sdp_priority_order()) == TORCHS


@constant_in_graphs
def _all_allowed() -> bool:
    """Whether no operator is switched off: `sdpa_kernel` would switch it on again."""
    return set(SDPA.values()) <= set(_cur_sdpa_kernel_backends())


def _first_tensor(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    return None


# -- who calls it ------------------------------------------------------------------------------------------------------


def calls_attention(module: nn.Module) -> bool:
    """Whether the code of a module's forward, or of functions up to `DEPTH` calls away, names torch's attention."""
    visited_ids: set[int] = set()
    level: list[tuple[Callable, bool]] = [(type(module).forward, True)]
    for _ in range(DEPTH + 1):
        next_level: list[tuple[Callable, bool]] = []
        for function, is_method in level:
            if function is F.scaled_dot_product_attention:
                return True
            source = inspect.unwrap(function)
            if isinstance(source, types.FunctionType) and id(source) not in visited_ids:
                visited_ids.add(id(source))
                next_level += _named(source, module, is_method)
        level = next_level
    return any(function is F.scaled_dot_product_attention for function, _ in level)


def _kind(module: nn.Module) -> Hashable:
    """All that `calls_attention` reads of a module: equal for modules of which it says the same."""
    attributes = (
        (name, id(value) if _is_function(value) else value)
        for name, value in vars(module).items()
        if isinstance(value, str) or _is_function(value)
    )
    return type(module), id(getattr(module, "config", None)), tuple(attributes)


def _named(source: types.FunctionType, module: nn.Module, is_method: bool) -> Iterator[tuple[Callable, bool]]:
    """Functions that the code of `source` names, and whether they are methods of `module`."""
    names = set(_names(source.__code__))
    named_values = [source.__globals__[n] for n in names if n in source.__globals__]
    named_values += [cell.cell_contents for cell in source.__closure__ or () if _is_full(cell)]
    for value in named_values:  # grows: `torch` leads to `torch.nn`, and that to `torch.nn.functional`
        if isinstance(value, types.ModuleType):
            inside = (vars(value)[n] for n in names if n in vars(value))
            named_values += [v for v in inside if not any(v is k for k in named_values)]
        elif isinstance(value, Mapping):
            yield from ((f, False) for f in _chosen(value, module, names))
        elif _is_function(value):
            yield value, False
    if not is_method:
        return
    for name in names:
        if _is_function(vars(module).get(name)):
            yield vars(module)[name], False
        for cls in type(module).__mro__:
            value = vars(cls).get(name)
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if _is_function(function):
                yield function, True  # type: ignore[misc]


def _chosen(functions: Mapping, module: nn.Module, names: set[str]) -> Iterator[Callable]:
    """The functions that a forward takes from a table: under a key that its module, or the module's config, holds."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            key = _held(holder, name)
            if isinstance(key, str) and key in functions and _is_function(functions[key]):
                yield functions[key]


def _held(holder: object, name: str) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # diffusers warns who reads a config from its model
            return getattr(holder, name, None)
    except Exception:  # a config whose layers differ has no single answer
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_function(value: object) -> bool:
    return isinstance(value, types.FunctionType) or value is F.scaled_dot_product_attention


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
