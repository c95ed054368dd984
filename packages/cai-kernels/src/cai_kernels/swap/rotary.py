"""Rotary embedding, found by what a function does: a global that a module's forward calls and that rotates q and k.

The forward gets globals of its own in which that name is our kernel, so nothing changes for other models of the file.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from cai_kernels.backend import Backend
from cai_kernels.rope import rope
from cai_kernels.swap.record import Swapped, taken

HEAD, TOKENS = 8, 3
OPTIONAL = {
    "position_ids": None,
    "unsqueeze_dim": 1,
}  # further arguments such a function may have, at these defaults


@dataclass(frozen=True)
class Rotation:
    """What a rotating function does.

    Args:
        interleaved: pairs are neighbours; else a half apart.
        table: where its cos and sin repeat the value of a pair: in the other half ("halves") or next to it ("pairs").
    """

    interleaved: bool
    table: str


def swap_rotary(model: nn.Module, record: Swapped, backend: Backend) -> None:
    """Replace the forward of every module that rotates queries and keys with a function of its file."""
    known: dict[int, dict[str, Rotation]] = {}
    for name, module in model.named_modules():
        source = inspect.unwrap(type(module).forward)
        if not isinstance(source, types.FunctionType):
            continue
        if id(source) not in known:
            known[id(source)] = _rotations(source)
        found = known[id(source)]
        if not found:
            continue
        reason = taken(module)
        if reason is None and source is not type(module).forward:
            reason = "its forward is decorated"
        if reason is not None:
            record.leave(name, "rope", reason)
            continue
        described = " and ".join(sorted({f"rope(interleaved={r.interleaved})" for r in found.values()}))
        record.put(name, module, _with_kernels(source, found, backend), "rope", described)


def _rotations(source: types.FunctionType) -> dict[str, Rotation]:
    """Names of the rotating functions that `source` calls, and what they do."""
    found = {}
    for name in source.__code__.co_names:
        function = source.__globals__.get(name)
        if isinstance(function, types.FunctionType) and _takes_queries_and_keys(function):
            rotation = _recognize(function)
            if rotation is not None:
                found[name] = rotation
    return found


def _takes_queries_and_keys(function: Callable) -> bool:
    params = list(inspect.signature(function).parameters.values())
    optional = {p.name: p.default for p in params[4:]}
    first = [p.name for p in params[:4]]
    required = all(p.default is p.empty for p in params[:4])
    return (
        required
        and first == ["q", "k", "cos", "sin"]
        and all(name in OPTIONAL and default == OPTIONAL[name] for name, default in optional.items())
    )


def _recognize(function: Callable) -> Rotation | None:
    """What `function` does; None when it is no rotation we know."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, TOKENS, HEAD, generator=random)
    k = torch.randn(2, 2, TOKENS, HEAD, generator=random)
    angle = torch.randn(2, TOKENS, HEAD // 2, generator=random)
    for table in ("halves", "pairs"):
        whole = torch.cat((angle, angle), -1) if table == "halves" else angle.repeat_interleave(2, -1)
        try:
            with torch.no_grad():
                expected = function(q, k, whole.cos(), whole.sin())
        except Exception:
            return None
        if not isinstance(expected, tuple) or len(expected) != 2:
            return None
        for interleaved in (False, True):
            rotation = Rotation(interleaved, table)
            got = _rotate(rotation, "reference")(q, k, whole.cos(), whole.sin())
            same = (
                a.shape == b.shape and torch.allclose(a, b, atol=1e-6)
                for a, b in zip(got, expected, strict=True)
            )
            if all(same):
                return rotation
    return None


def _with_kernels(source: types.FunctionType, found: dict[str, Rotation], backend: Backend) -> Callable:
    """`source` with the functions in `found` replaced by kernels."""
    # without a name of a module, so that torch.compile looks names up here and not in the module
    scope = {n: v for n, v in source.__globals__.items() if n != "__name__"}
    scope |= {name: _rotate(rotation, backend) for name, rotation in found.items()}
    forward = types.FunctionType(
        source.__code__, scope, source.__name__, source.__defaults__, source.__closure__
    )
    forward.__kwdefaults__ = source.__kwdefaults__
    return forward


def _rotate(rotation: Rotation, backend: Backend) -> Callable:
    def rotate(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        width = cos.shape[-1]
        options = {"interleaved": rotation.interleaved, "rotary_dim": width, "backend": backend}
        one_a_pair = slice(None, None, 2) if rotation.table == "pairs" else slice(width // 2)
        cos, sin = cos[..., one_a_pair], sin[..., one_a_pair]
        if unsqueeze_dim == 1:
            return rope(q, k, cos, sin, **options)
        turned = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, **options)
        return turned[0].transpose(1, 2), turned[1].transpose(1, 2)

    return rotate
