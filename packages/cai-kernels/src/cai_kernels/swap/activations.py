"""Gated activations, found in the traced graph of an MLP: `act(gate) * up` becomes one kernel.

A module is traced with its children as leaves, so they are still called, hooks and all. What the activation child
computes is found by trying it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from operator import mul

import torch
import torch.fx
from torch import nn
from torch.nn import functional as F

from cai_kernels.backend import Backend
from cai_kernels.gated import geglu, swiglu
from cai_kernels.swap.record import Swapped, taken

Gated = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Shallow(torch.fx.Tracer):
    """Traces one module's own forward and none of its children's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def swap_activations(model: nn.Module, record: Swapped, backend: Backend) -> None:
    """Rewrite the forward of every module that multiplies a child's activation with another tensor."""
    for name, module in list(model.named_modules()):
        gates = {n: kind for n, child in module.named_children() if (kind := _activation(child)) is not None}
        if not gates:
            continue
        reason = taken(module) or _branches(module)
        if reason is None:
            try:
                graph = _Shallow().trace(module)
            except Exception as error:
                reason = f"its forward cannot be traced: {str(error).splitlines()[0]}"
        if reason is not None:
            record.leave(name, "activation", reason)
            continue
        kinds = _rewrite(graph, gates, backend)
        if kinds:
            record.put(
                name,
                module,
                type(torch.fx.GraphModule(module, graph)).forward,
                "activation",
                " and ".join(kinds),
            )


def _branches(module: nn.Module) -> str | None:
    """Why a module is left whose forward may do something else with other arguments: a trace takes one way."""
    optional = [
        n for n, p in inspect.signature(module.forward).parameters.items() if p.default is not p.empty
    ]
    return f"its forward may do without {', '.join(optional)}" if optional else None


def _activation(module: nn.Module) -> str | None:
    """silu, gelu or gelu-tanh, when a module without parameters or children computes it."""
    if next(module.children(), None) is not None or next(module.parameters(), None) is not None:
        return None
    x = torch.linspace(-6, 6, 25)
    try:
        with torch.no_grad(), torch.device("cpu"):
            got = module(x)
    except Exception:
        return None
    if not isinstance(got, torch.Tensor) or got.shape != x.shape:
        return None
    known = {"silu": F.silu(x), "gelu-tanh": F.gelu(x, approximate="tanh"), "gelu": F.gelu(x)}
    return next((k for k, v in known.items() if torch.allclose(got, v, rtol=1e-6, atol=1e-6)), None)


def _kernel(kind: str, backend: Backend) -> tuple[str, Gated]:
    if kind == "silu":
        return "swiglu", partial(swiglu, backend=backend)
    approximate = "tanh" if kind == "gelu-tanh" else "none"
    return f'geglu(approximate="{approximate}")', partial(geglu, approximate=approximate, backend=backend)


def _rewrite(graph: torch.fx.Graph, gates: dict[str, str], backend: Backend) -> list[str]:
    """Replace products with an activation by kernels; returns their names."""
    put = []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (torch.mul, torch.Tensor.mul, mul):
            continue
        gate = next((a for a in node.args if _is_gate(a, gates)), None)
        if gate is None or len(node.args) != 2:
            continue
        up = node.args[1] if node.args[0] is gate else node.args[0]
        if not isinstance(up, torch.fx.Node):
            continue
        described, kernel = _kernel(gates[str(gate.target)], backend)
        with graph.inserting_before(node):
            fused = graph.call_function(_named(kernel, described), (gate.args[0], up))
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


def _named(kernel: Gated, described: str) -> Gated:
    """A named function, which the code of the graph can call."""

    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return kernel(gate, up)

    gated.__name__ = gated.__qualname__ = described.split("(")[0]
    return gated
