"""Inspection of a forward: what its code reads, decides and writes, and what its operators do with values.

A trial shows what a module does on some values. It stands for all values only if the code has nothing that a trial can
miss: a decision by length, mode, values or state. These are found in compiled code, so that no source is needed.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.Size)
LIBRARIES = ("torch", "math", "operator", "typing")
WRITES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR")
DECIDES = ("COMPARE_OP", "CONTAINS_OP")
STEPS = ("//", "%", "&", "|", "^", "<<", ">>")  # with these, numbers decide without a branch


@dataclass
class Code:
    """The content of a function's code and of those it calls, torch's own left out.

    Args:
        words: every name in the code: of attributes, methods and globals.
        attributes: plain values and functions that the code reads from the module, by name: "eps", "config.act".
        scopes: plain values that it reads from globals: (globals, name, value).
        decides: whether something depends on a comparison, a branch or a rounded division; checks that raise are none.
        training: whether it reads the module's mode.
        trouble: the first thing found for which no trial can stand.
    """

    words: set[str] = field(default_factory=set)
    attributes: dict[str, Any] = field(default_factory=dict)
    scopes: list[tuple[dict, str, Any]] = field(default_factory=list)
    decides: bool = False
    training: bool = False
    trouble: str | None = None

    @property
    def mode(self) -> str | None:
        """The reason why it cannot be replaced where training and evaluation have to be alike, or None."""
        return "its forward depends on training" if self.training else None

    def guard(self, leave_out: set[str] = frozenset()) -> Guard:  # type: ignore[assignment]
        attributes = tuple((n, v) for n, v in self.attributes.items() if n not in leave_out)
        return Guard(attributes, tuple(self.scopes))


@dataclass(frozen=True)
class Guard:
    """Values that were read when a module was recognized; while they are the same, so is what it computes."""

    attributes: tuple[tuple[str, Any], ...]
    scopes: tuple[tuple[dict, str, Any], ...] = ()

    def holds(self, module: nn.Module) -> bool:
        for name, value in self.attributes:
            holder, _, last = name.rpartition(".")
            if not same(getattr(getattr(module, holder, None) if holder else module, last, None), value):
                return False
        return all(same(scope.get(name), value) for scope, name, value in self.scopes)


def same(now: Any, value: Any) -> bool:
    """Whether an attribute is what it was; methods and partial functions of a copied module are."""
    if now is value:
        return True
    if type(now) is not type(value):
        return False
    if isinstance(value, types.MethodType):
        return now.__func__ is value.__func__
    if isinstance(value, functools.partial):
        return (now.func, now.args, now.keywords) == (value.func, value.args, value.keywords)
    return now == value


def read(function: Callable, module: nn.Module | None = None) -> Code:
    """The code of `function`, of methods of `module` and of functions that it names."""
    code, visited_ids, todo = Code(), set(), [function]
    while todo:
        source = todo.pop()
        if id(source) in visited_ids:
            continue
        visited_ids.add(id(source))
        if not isinstance(source, types.FunctionType):
            code.trouble = code.trouble or f"the code of {_name_of(source)} cannot be read"
            continue
        if inspect.unwrap(source) is not source:
            code.trouble = code.trouble or "its forward is decorated"
        for part in _parts(source.__code__):
            _look(part, code)
            code.words |= set(part.co_names)
            todo += _follow(source, part, module, code)
    return code


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)


def _look(part: types.CodeType, code: Code) -> None:
    steps = list(dis.get_instructions(part))
    checks = {i for i, step in enumerate(steps) if _only_raises(steps, i)}
    for i, step in enumerate(steps):
        around = step.opname == "STORE_DEREF" and step.argval in part.co_freevars
        if step.opname in WRITES or around:
            code.trouble = code.trouble or "its forward writes to what it keeps or is given"
        elif i in checks or i + 1 in checks:
            continue
        elif step.opname in DECIDES or _asks(step.opname) or (_rounds(step) and not _of_width(steps, i)):
            code.decides = True


def _only_raises(steps: list[dis.Instruction], at: int) -> bool:
    """Whether a conditional jump only passes over an error."""
    if not _asks(steps[at].opname):
        return False
    target = next((i for i, s in enumerate(steps) if s.offset == steps[at].argval), 0)
    passed = steps[at + 1 : target]
    return bool(passed) and passed[-1].opname == "RAISE_VARARGS" and not any(_asks(s.opname) for s in passed)


def _rounds(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_OP" and step.argrepr.rstrip("=") in STEPS


def _of_width(steps: list[dis.Instruction], at: int) -> bool:
    """Whether a division is of a last dim, `x.shape[-1] // 2`: that is the module's own width."""
    return any(step.argval == -1 for step in steps[max(0, at - 4) : at])


def _asks(jump: str) -> bool:
    """Whether a jump depends on a value; one on None depends on arguments and attributes, which are guarded."""
    return "JUMP_" in jump and "IF" in jump and not jump.endswith("NONE")


def _follow(
    source: types.FunctionType, part: types.CodeType, module: nn.Module | None, code: Code
) -> Iterator[Callable]:
    """Functions that a part of a function's code leads to; what else it reads is noted in `code`."""
    names = set(part.co_names)
    around = dict(zip(source.__code__.co_freevars, source.__closure__ or (), strict=False))
    read_globals = {s.argval for s in dis.get_instructions(part) if s.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for name in read_globals & set(source.__globals__):
        yield from _of_scope(source.__globals__, name, code)
    for name in set(part.co_freevars) & set(around):
        if name != "__class__":
            yield from _of_scope({name: around[name].cell_contents}, name, code)
    if module is None:
        return
    for name in names:
        for cls in type(module).__mro__:
            if cls not in (nn.Module, object) and isinstance(vars(cls).get(name), types.FunctionType):
                yield vars(cls)[name]
        yield from _of_module(module, name, names, code)


def _of_scope(scope: dict, name: str, code: Code) -> Iterator[Callable]:
    value = scope[name]
    if is_plain(value):
        code.scopes.append((scope, name, value))
    elif isinstance(value, types.ModuleType):
        if value.__name__.split(".")[0] not in LIBRARIES:
            code.trouble = code.trouble or f"its forward uses {name}"
    elif isinstance(value, types.FunctionType) and not is_torchs(value):
        yield value
    elif not callable(value) or not (is_torchs(value) or getattr(builtins, name, None) is value):
        code.trouble = code.trouble or f"its forward reads {name}, which is around it and may change"


def _of_module(module: nn.Module, name: str, names: set[str], code: Code) -> Iterator[Callable]:
    """Functions behind an attribute of the module; a plain one is noted."""
    if name == "forward":
        return
    if name in vars(module):
        value = vars(module)[name]
    else:
        value = next((vars(c)[name] for c in type(module).__mro__[:-2] if name in vars(c)), nn.Module)
    if name == "training":
        code.training = True
    elif is_plain(value):
        code.attributes[name] = value
    elif value is not nn.Module and not isinstance(value, types.FunctionType) and not callable(value):
        _note_parts(value, name, names, code)
    elif name in vars(module):
        code.attributes[name] = value
        yield from _behind(value, name, code)


def _note_parts(value: Any, name: str, names: set[str], code: Code) -> None:
    """Note what a forward reads of an object that its module holds: `self.config.act`."""
    parts = {} if isinstance(value, torch.Tensor) else getattr(value, "__dict__", {})
    read_parts = {n: parts[n] for n in names & set(parts)}
    if not read_parts or not all(map(is_plain, read_parts.values())):
        code.trouble = code.trouble or f"its forward reads {name}, a {type(value).__name__} that may change"
    code.attributes |= {f"{name}.{n}": v for n, v in read_parts.items()}


def _behind(value: Any, name: str, code: Code) -> Iterator[Callable]:
    """The function that a callable attribute runs, if it is in Python."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType) and not is_torchs(value):
        yield value
    elif not is_torchs(value) and not isinstance(value, types.BuiltinFunctionType):
        code.trouble = code.trouble or f"its forward calls {name}, a {type(value).__name__}"


def is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def is_error(name: str) -> bool:
    """Whether a name is that of one of Python's errors, which a check raises."""
    value = getattr(builtins, name, None)
    return isinstance(value, type) and issubclass(value, Exception)


def is_torchs(value: Any) -> bool:
    return str(getattr(value, "__module__", None) or "").split(".")[0] in ("torch", "_operator", "math")


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__name__)


class Watch(TorchDispatchMode):
    """Runs operators as usual and notes the first that makes results depend on more than smooth arithmetic."""

    def __init__(self):
        super().__init__()
        self.trouble: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.trouble is None:
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.trouble = "it draws random numbers"
            elif func is torch.ops.aten._local_scalar_dense.default:
                self.trouble = "its code reads values of tensors"
            elif isinstance(out, torch.Tensor) and out.dtype == torch.bool:
                self.trouble = "it compares values of tensors"
        return out


def transformed() -> bool:
    """Whether torch.func (vmap, grad, ...) runs, for which kernels have no rules."""
    return (
        not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]
    )


def hooked(module: nn.Module) -> bool:
    """Whether calls of a module are watched by hooks of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
