"""Gated activations, found in the traced graph of an MLP: `act(gate) * up` becomes one kernel.

A module is traced with its children as leaves, so they are still called, hooks and all. What the activation child
computes is found by its code and by trying it. A trace takes what the code reads from the module as it is then, so the
traced forward runs while that is the same, and the old one else.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.nn import functional as F

from cai_kernels.backend import Backend
from cai_kernels.gated import geglu, swiglu
from cai_kernels.swap.record import Swapped, taken
from cai_kernels.swap.structure import Guard, Watch, hooked, read, transformed

Gated = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# a trace does not see what these are asked about, or answers for itself
BLIND = {
    *("isinstance", "hasattr", "getattr", "callable", "vars", "globals", "is_tensor", "no_grad", "set_grad_enabled"),
    *("is_grad_enabled", "is_autocast_enabled", "is_compiling", "is_tracing", "is_scripting", "checkpoint", "item"),
}  # fmt: skip
ACTIVATION_WORDS = {
    *("torch", "nn", "F", "functional", "math", "silu", "gelu", "sigmoid", "tanh", "erf", "pow", "sqrt", "pi", "mul"),
}  # fmt: skip
PLACES = {getattr(operator, n) for n in dir(operator) if n.startswith("i") and hasattr(operator, f"__{n}__")}
PLACES -= {operator.index, operator.inv, operator.invert}


@dataclass(frozen=True)
class Activation:
    """An activation child: what it computes, what it has to stay to compute it, and why it cannot be relied on."""

    kind: str
    cls: type[nn.Module]
    guard: Guard
    trouble: str | None

    def holds(self, child: nn.Module | None) -> bool:
        if type(child) is not self.cls or hooked(child):
            return False
        return "forward" not in child.__dict__ and self.guard.holds(child)


class _Shallow(torch.fx.Tracer):
    """Traces one module's own forward and none of its children's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def swap_activations(model: nn.Module, record: Swapped, backend: Backend) -> None:
    """Rewrite the forward of every module that multiplies a child's activation with another tensor."""
    shared: dict[tuple[Any, ...], Callable] = {}
    for name, module in list(model.named_modules()):
        gates = {n: gate for n, child in module.named_children() if (gate := _activation(child)) is not None}
        if not gates:
            continue
        code = read(type(module).forward, module)
        reason = (
            taken(module) or _branches(module) or code.trouble
        )  # with trouble nothing runs: it may keep state
        traced: dict[bool, Callable] = {}
        kinds: list[str] = []
        for training in (True, False) if reason is None else ():
            graph, untraced = _trace(module, training)
            reason = reason or untraced
            kinds = _rewrite(graph, {n: gate.kind for n, gate in gates.items()}, backend)
            traced[training] = _forward_of(module, graph, shared)
        if kinds:
            of_gates = (gate.trouble for gate in gates.values() if gate.trouble)
            reason = reason or _blind(code.words) or next(of_gates, None)
        if reason is not None:
            record.leave(name, "activation", reason)
        elif kinds:
            if not code.training:
                traced[False] = traced[True]
            forward = _guarded(traced, code.guard(set(gates)), gates)
            record.put(name, module, forward, "activation", " and ".join(kinds))


def _forward_of(
    module: nn.Module, graph: torch.fx.Graph, shared: dict[tuple[Any, ...], Callable]
) -> Callable:
    """Return the function of a graph; graphs that are alike have one, as torch compiles each for itself."""
    traced = torch.fx.GraphModule(module, graph)
    functions = tuple(node.target for node in graph.nodes if node.op == "call_function")
    return shared.setdefault((traced.code, functions), type(traced).forward)


def _guarded(traced: dict[bool, Callable], guard: Guard, gates: dict[str, Activation]) -> Callable:
    """The traced forward of the mode, while the module and its activations are as they were traced."""
    children = tuple(gates.items())
    in_training, in_evaluation = traced[True], traced[False]

    def forward(self, *args, **kwargs):
        for name, activation in children:
            if not activation.holds(self._modules.get(name)):
                return type(self).forward(self, *args, **kwargs)
        if not guard.holds(self):
            return type(self).forward(self, *args, **kwargs)
        return (in_training if self.training else in_evaluation)(self, *args, **kwargs)

    return forward


def _branches(module: nn.Module) -> str | None:
    """The reason to leave a module whose forward may do something else with other arguments: a trace takes one way."""
    optional = [
        n for n, p in inspect.signature(module.forward).parameters.items() if p.default is not p.empty
    ]
    return f"its forward may do without {', '.join(optional)}" if optional else None


def _blind(words: set[str]) -> str | None:
    blind_words = sorted(words & BLIND)
    return (
        f"its forward uses {', '.join(blind_words)}, which a trace answers for itself"
        if blind_words
        else None
    )


def _trace(module: nn.Module, training: bool) -> tuple[torch.fx.Graph, str | None]:
    """The graph of a module's own forward in a mode, and why it does not stand for that."""
    empty, was = torch.fx.Graph(), module.training
    module.training = training
    try:
        with Watch() as watch:
            graph = _Shallow().trace(module)
    except Exception as error:
        return empty, f"its forward cannot be traced: {str(error).splitlines()[0]}"
    finally:
        module.training = was
    if watch.trouble is not None:
        return empty, f"traced, {watch.trouble}"
    for node in graph.nodes:
        method = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        called = node.op in ("call_method", "call_function")
        if called and (node.target in PLACES or (method.endswith("_") and not method.endswith("__"))):
            return empty, f"its forward writes into a tensor: {method}"
        if node.op == "get_attr" and str(node.target).startswith("_tensor_constant"):
            return empty, "its forward makes a tensor that a trace would keep"
    return graph, None


def _activation(module: nn.Module) -> Activation | None:
    """The activation that a module without parameters or children computes, if it seems to be silu or gelu."""
    if next(module.children(), None) is not None or next(module.parameters(), None) is not None:
        return None
    module = copy.deepcopy(module)  # it may keep state
    kind = _tried(module, torch.linspace(-6, 6, 25))
    if kind is None:
        return None
    code = read(type(module).forward, module)
    strange = sorted(code.words - set(code.attributes) - ACTIVATION_WORDS - _methods(module))
    reason = code.mode or code.trouble
    if strange or code.decides:
        reason = reason or f"its code {'uses ' + ', '.join(strange) if strange else 'decides something'}"
    reason = reason or _differs(module, kind)
    trouble = None if reason is None else f"{type(module).__name__} is no plain {kind}: {reason}"
    return Activation(kind, type(module), code.guard(), trouble)


def _differs(module: nn.Module, kind: str) -> str | None:
    """Whether a module computes something else in other ranges, shapes or modes."""
    trials = (
        torch.linspace(-1e4, 1e4, 401),
        torch.linspace(-1e-3, 1e-3, 12).view(3, 1, 4),
        torch.empty(0, 4),
    )
    for module.training in (True, False):
        if any(_tried(module, x, kind) != kind for x in trials):
            return "it computes something else for large values, other shapes or in another mode"
    return None


def _methods(module: nn.Module) -> set[str]:
    return {n for c in type(module).__mro__[:-2] for n in vars(c)}


def _tried(module: nn.Module, x: torch.Tensor, kind: str | None = None) -> str | None:
    """The activation (only `kind`, if any) that a module computes for `x`, with its gradient, leaving `x` as it is."""
    leaf = x.clone().requires_grad_()
    x = leaf * 1
    before = x._version
    try:
        with torch.enable_grad(), torch.device("cpu"):
            got = type(module).forward(module, x)
    except Exception:
        return None
    if not isinstance(got, torch.Tensor) or got.shape != x.shape or x._version != before:
        return None
    if not got.requires_grad:
        return None
    slope = torch.autograd.grad(got.sum(), leaf)[0]
    for name, function in PLAIN.items():
        y = leaf.detach().requires_grad_()
        want = function(y)
        close = torch.allclose(got, want, rtol=1e-6, atol=1e-6) and kind in (None, name)
        if close and torch.allclose(slope, torch.autograd.grad(want.sum(), y)[0], rtol=1e-4, atol=1e-4):
            return name
    return None


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


@functools.cache  # one function, so that layers have one code
def _kernel(kind: str, backend: Backend) -> tuple[str, Gated]:
    """A name for the record, and the kernel: for what it takes, else the product in plain torch."""
    if kind == "silu":
        described = "swiglu"
    else:
        described = f'geglu(approximate="{"tanh" if kind == "gelu-tanh" else "none"}")'

    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        fits = isinstance(up, torch.Tensor) and gate.shape == up.shape and gate.dim() > 0
        if not fits or gate.dtype != up.dtype or gate.dtype not in DTYPES or transformed():
            return PLAIN[kind](gate) * up
        if kind == "silu":
            return swiglu(gate, up, backend=backend)
        return geglu(gate, up, approximate="tanh" if kind == "gelu-tanh" else "none", backend=backend)

    gated.__name__ = gated.__qualname__ = described.split("(")[
        0
    ]  # the code of the graph calls it by this name
    return described, gated


def _rewrite(graph: torch.fx.Graph, gates: dict[str, str], backend: Backend) -> list[str]:
    """Replace products with an activation by kernels; returns their names."""
    put = []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (torch.mul, torch.Tensor.mul, operator.mul):
            continue
        gate = next((a for a in node.args if _is_gate(a, gates)), None)
        if gate is None or len(node.args) != 2:
            continue
        up = node.args[1] if node.args[0] is gate else node.args[0]
        if not isinstance(up, torch.fx.Node):
            continue
        described, kernel = _kernel(gates[str(gate.target)], backend)
        with graph.inserting_before(node):
            fused = graph.call_function(kernel, (gate.args[0], up))
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        graph.erase_node(gate)
        put.append(described)
    return put


def _is_gate(value: object, gates: dict[str, str]) -> bool:
    return (
        isinstance(value, torch.fx.Node)
        and value.op == "call_module"
        and value.target in gates
        and len(value.users) == 1
        and len(value.args) == 1
        and not value.kwargs
    )
