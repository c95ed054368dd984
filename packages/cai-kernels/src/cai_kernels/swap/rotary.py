"""Rotary embedding, found by what a function does: a global that a module's forward calls and that rotates q and k.

The forward gets globals of its own in which that name is our kernel, so nothing changes for other models of the file.
The function is one without decisions, that rotates as ours does for all lengths, ranges and dtypes tried. Calls of
another form (positions, other shapes, dtypes that were not tried) run the function itself.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cai_kernels.backend import Backend
from cai_kernels.rope import rope
from cai_kernels.swap.record import Swapped, taken
from cai_kernels.swap.structure import Watch, is_plain, read, same, transformed

HEAD = 8
OPTIONAL = {
    "position_ids": None,
    "unsqueeze_dim": 1,
}  # further arguments such a function may have, at these defaults
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
WORDS = {
    *("torch", "shape", "size", "to", "dtype", "float", "type_as", "unsqueeze", "cat", "stack", "stack_freqs", "chunk"),
    *("repeat_interleave", "flatten", "unflatten", "reshape", "view", "transpose", "permute", "split", "sum", "neg"),
    *("contiguous", "squeeze", "view_as", "mul", "add", "unbind", "int", "float32", "concat", "expand", "roll"),
}  # fmt: skip


@dataclass(frozen=True)
class Rotation:
    """The rotation that a function computes.

    Args:
        interleaved: pairs are neighbours; else a half apart.
        table: the place where cos and sin repeat a pair's value: the other half ("halves") or next to it ("pairs").
        partial: whether a table narrower than a head turns the first dims and passes the others on.
        dtypes: pairs of dtypes of queries and table, for which results agree.
    """

    interleaved: bool
    table: str
    partial: bool = False
    dtypes: frozenset[tuple[torch.dtype, torch.dtype]] = frozenset()

    def fits(self, q: Any, k: Any, cos: Any, sin: Any) -> bool:
        """Whether the kernel takes these; no value of a tensor is looked at."""
        if not all(isinstance(t, torch.Tensor) for t in (q, k, cos, sin)) or transformed():
            return False
        if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or cos.dtype != sin.dtype:
            return False
        if q.dtype != k.dtype or (q.dtype, cos.dtype) not in self.dtypes:
            return False
        if cos.requires_grad or sin.requires_grad:  # learned angles: the kernel has no gradient of them
            return False
        batch, _, length, size = q.shape
        width = cos.shape[-1]
        wide = width == size or (self.partial and width % 2 == 0 and width < size)
        shapes_match = (k.shape[0], k.shape[2], k.shape[3]) == (batch, length, size)
        return wide and shapes_match and cos.shape[1] == length and cos.shape[0] in (1, batch)


def swap_rotary(model: nn.Module, record: Swapped, backend: Backend) -> None:
    """Replace the forward of every module that rotates queries and keys with a function of its file."""
    rotation_cache: dict[int, dict[str, Rotation | str]] = {}
    for name, module in model.named_modules():
        source = inspect.unwrap(type(module).forward)
        if not isinstance(source, types.FunctionType):
            continue
        if id(source) not in rotation_cache:
            rotation_cache[id(source)] = _rotations(source)
        rotations = {n: r for n, r in rotation_cache[id(source)].items() if isinstance(r, Rotation)}
        if not rotation_cache[id(source)]:
            continue
        reason = taken(module)
        if reason is None and not rotations:
            reason = next(str(r) for r in rotation_cache[id(source)].values())
        if reason is not None:
            record.leave(name, "rope", reason)
            continue
        forward = _decorated(type(module).forward, source, _with_kernels(source, rotations, backend))
        if forward is None:
            record.leave(name, "rope", "a decorator of its forward keeps it in another place than a variable")
            continue
        described = " and ".join(sorted({f"rope(interleaved={r.interleaved})" for r in rotations.values()}))
        record.put(name, module, forward, "rope", described)


def _rotations(source: types.FunctionType) -> dict[str, Rotation | str]:
    """Names of the functions that `source` calls and that rotate; what they do, or why they are left."""
    rotations = {}
    for name in source.__code__.co_names:
        function = source.__globals__.get(name)
        if isinstance(function, types.FunctionType) and _takes_queries_and_keys(function):
            rotation = _recognize(function)
            if rotation is not None:
                rotations[name] = rotation
    return rotations


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


# -- what a function does ----------------------------------------------------------------------------------------------


def _recognize(function: Callable) -> Rotation | str | None:
    """The rotation of `function`; why it is left, if it only seems to rotate; None when it is no rotation we know."""
    kinds = [Rotation(i, table) for table in ("halves", "pairs") for i in (False, True)]
    rotation = next((r for r in kinds if _alike(function, r, _inputs(3, r.table))), None)
    if rotation is None:
        return None
    code = read(function)
    helpers = {
        n for n in code.words if isinstance(getattr(function, "__globals__", {}).get(n), types.FunctionType)
    }
    strange = sorted(code.words - WORDS - helpers)
    if code.trouble or code.scopes or code.decides:
        return code.trouble or ("it decides something" if code.decides else f"it reads {code.scopes[0][1]}")
    if strange:
        return f"its rotation uses {', '.join(strange)}, which no rotation needs"
    for length, scale in ((1, 1.0), (17, 30.0), (300, 1e-3), (0, 1.0)):
        if not _alike(function, rotation, _inputs(length, rotation.table, scale)):
            return f"its rotation is another one for {length} tokens with values near {scale:g}"
    inputs = _inputs(3, rotation.table)
    with Watch() as watch:
        function(*inputs)
    if watch.trouble is not None:
        return f"its rotation: {watch.trouble}"
    pairs = frozenset(
        (of_q, of_table)
        for of_q, of_table in itertools.product(ROUNDING, ROUNDING)
        if _alike(
            function,
            rotation,
            [t.to(d) for t, d in zip(inputs, (of_q, of_q, of_table, of_table), strict=True)],
        )
    )
    narrow = _alike(function, rotation, _inputs(3, rotation.table, width=HEAD // 2))
    return Rotation(rotation.interleaved, rotation.table, narrow, pairs)


def _inputs(length: int, table: str, scale: float = 1.0, width: int = HEAD) -> list[torch.Tensor]:
    """Queries, keys, and the tables of random angles, repeated as `table` says."""
    random = torch.Generator().manual_seed(length)
    q = torch.randn(2, 4, length, HEAD, generator=random) * scale
    k = torch.randn(2, 2, length, HEAD, generator=random) * scale
    angle = torch.randn(2, length, width // 2, generator=random)
    angles = torch.cat((angle, angle), -1) if table == "halves" else angle.repeat_interleave(2, -1)
    return [q, k, angles.cos() * 1.1, angles.sin() * 1.1]  # some models scale their tables


def _alike(function: Callable, rotation: Rotation, inputs: list[torch.Tensor]) -> bool:
    """Whether `function` gives what a rotation gives, and its gradients, and leaves its inputs as they are."""
    q, k, *tables = inputs
    results = []
    for run in (function, lambda *tensors: _kernel(rotation, tensors, "reference")):
        q, k = (t.detach().clone().requires_grad_() for t in (q, k))
        before = [t._version for t in (q, k, *tables)]
        try:
            out = run(q, k, *tables)
            gradients = torch.autograd.grad([t.float().square().sum() for t in out], (q, k))
        except Exception:
            return False
        if not isinstance(out, tuple) or len(out) != 2 or before != [t._version for t in (q, k, *tables)]:
            return False
        results.append((*out, *gradients))
    atol = ROUNDING[q.dtype] * max(1.0, float(q.detach().abs().max()) if q.numel() else 0.0)
    return all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        and torch.allclose(a, b, rtol=ROUNDING[q.dtype], atol=4 * atol)
        for a, b in zip(*results, strict=True)
    )


# -- what runs instead -------------------------------------------------------------------------------------------------


def _with_kernels(source: types.FunctionType, rotations: dict[str, Rotation], backend: Backend) -> Callable:
    """`source` with the functions in `rotations` replaced by kernels."""
    # without a name of a module, so that torch.compile looks names up here and not in the module
    scope = {n: v for n, v in source.__globals__.items() if n != "__name__"}
    scope |= {name: _rotate(scope[name], rotation, backend) for name, rotation in rotations.items()}
    inner = types.FunctionType(
        source.__code__, scope, source.__name__, source.__defaults__, source.__closure__
    )
    inner.__kwdefaults__ = source.__kwdefaults__
    named = [(n, source.__globals__[n]) for n in source.__code__.co_names if n in source.__globals__]
    watched = tuple((n, v) for n, v in named if is_plain(v) or isinstance(v, types.FunctionType))

    @functools.wraps(source)
    def forward(self, *args, **kwargs):
        # its globals are a copy: what somebody puts into the real ones since counts too
        if not torch.compiler.is_compiling():
            now = source.__globals__
            for name, value in watched:
                if not same(now.get(name), value):
                    return source(self, *args, **kwargs)
        return inner(self, *args, **kwargs)

    forward.__name__ = "forward"  # the name under which pickle looks a bound method up
    del forward.__wrapped__
    return forward


def _decorated(outer: Callable, source: Callable, inner: Callable) -> Callable | None:
    """The decorators of `outer` around `inner` instead of `source`; None if one does not hold what it decorates in
    one variable of its own."""
    if outer is source:
        return inner
    wrapped = getattr(outer, "__wrapped__", None)
    holds_wrapped = [_content(cell) is wrapped for cell in getattr(outer, "__closure__", None) or ()]
    around = _decorated(wrapped, source, inner) if wrapped is not None and sum(holds_wrapped) == 1 else None
    if around is None or not isinstance(outer, types.FunctionType):
        return None
    cells = zip(outer.__closure__ or (), holds_wrapped, strict=True)
    closure = tuple(types.CellType(around) if is_holder else cell for cell, is_holder in cells)
    copy = types.FunctionType(outer.__code__, outer.__globals__, "forward", outer.__defaults__, closure)
    copy.__kwdefaults__ = outer.__kwdefaults__
    return copy


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _rotate(function: Callable, rotation: Rotation, backend: Backend) -> Callable:
    """The kernel for what it takes, else the function; tables that do not repeat, seen at first use, are not taken."""
    optional = list(inspect.signature(function).parameters)[4:]
    repeats: dict[int, bool] = {}

    def rotate(q, k, cos, sin, *args, **kwargs):
        options = OPTIONAL | dict(zip(optional, args, strict=False)) | kwargs
        heads_first, plain = options["unsqueeze_dim"] == 1, options["position_ids"] is None
        last = options["unsqueeze_dim"] == 2
        inputs = (q, k, cos, sin)
        if last and isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.dim() == k.dim() == 4:
            inputs = (q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        fits_options = plain and (heads_first or last) and options.keys() == OPTIONAL.keys()
        if not fits_options or not rotation.fits(*inputs) or not _repeats(rotation, cos, sin, repeats):
            return function(q, k, cos, sin, *args, **kwargs)
        turned = _kernel(rotation, inputs, backend)
        return (turned[0].transpose(1, 2), turned[1].transpose(1, 2)) if last else turned

    return rotate


def _repeats(rotation: Rotation, cos: torch.Tensor, sin: torch.Tensor, repeats: dict[int, bool]) -> bool:
    """Whether tables hold each pair's value twice. Looked at once a width, when a model first runs."""
    width = cos.shape[-1]
    if torch.compiler.is_compiling() or cos.is_meta or type(cos) is not torch.Tensor:
        return repeats.get(width, True)
    if cos.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph cannot be asked
        return repeats.get(width, True)
    if width not in repeats:
        paired_tables = (
            t.detach().unflatten(-1, (2, -1) if rotation.table == "halves" else (-1, 2)) for t in (cos, sin)
        )
        dim = -2 if rotation.table == "halves" else -1
        repeats[width] = all(torch.equal(*t.unbind(dim)) for t in paired_tables)
    return repeats[width]


def _kernel(rotation: Rotation, inputs: Any, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, cos, sin = inputs
    width = cos.shape[-1]
    one_a_pair = slice(None, None, 2) if rotation.table == "pairs" else slice(width // 2)
    options = {"interleaved": rotation.interleaved, "rotary_dim": width, "backend": backend}
    return rope(q, k, cos[..., one_a_pair], sin[..., one_a_pair], **options)
