"""What a compiled block keeps for backward: traced and divided as torch.compile does, compiled by nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from cai_apps.compose.blocks import is_attention, is_product


@dataclass(frozen=True)
class Division:
    """What goes from a forward graph to its backward.

    Args:
        inputs: those of the block's inputs that do.
        made: bytes of what the forward has made. Views of inputs and parameters take none.
        products: bytes of all results of matrix products and attention.
        attention: those of attention alone.
    """

    inputs: list[Tensor]
    made: int
    products: int
    attention: int


def divide(block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Division]:
    """Run a block's forward on fake tensors by its two graphs; return the results, and what the division leaves.

    The graphs are cut where torch.compile cuts them: where least is kept that is not cheap to make again
    (`min_cut_rematerialization_partition`).
    """
    from torch._functorch.aot_autograd import (
        aot_function,  # half a second and more, of a run that may not ask
    )
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    leaves, spec = tree_flatten((args, kwargs))
    at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    block_state = dict([*block.named_parameters(), *block.named_buffers()])
    graphs: list[torch.fx.GraphModule] = []

    def run(*tensors: Tensor) -> Any:
        inner_leaves = list(leaves)
        for index, tensor in zip(at, tensors[len(block_state) :], strict=True):
            inner_leaves[index] = tensor
        inner_args, inner_kwargs = tree_unflatten(inner_leaves, spec)
        with _Holding(block, dict(zip(block_state, tensors, strict=False))):
            return forward(*inner_args, **inner_kwargs)

    def take(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    traced = aot_function(
        run,
        fw_compiler=take,
        bw_compiler=lambda graph, inputs: graph,
        partition_fn=min_cut_rematerialization_partition,
    )
    tensors = [*block_state.values(), *(leaves[index] for index in at)]
    as_in_graphs = mock.patch.object(torch.compiler, "is_compiling", return_value=True)
    with (
        _disable_current_modes(),
        as_in_graphs,
    ):  # constants made inside are then real ones, as graphs have them
        output = traced(*tensors)
    results = sum(isinstance(leaf, Tensor) for leaf in tree_leaves(output))
    return output, _division(graphs[0], tensors, len(block_state), results)


def _division(graph: torch.fx.GraphModule, tensors: list[Tensor], state_count: int, results: int) -> Division:
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    place = {_storage(node): index for index, node in enumerate(placeholders)}
    (outputs,) = nodes[-1].args
    inputs, storage_bytes = [], {}
    for node in outputs[results:]:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(value, Tensor):
            continue
        index = place.get(_storage(node))
        if index is None:
            storage_bytes[_storage(node)] = value.untyped_storage().nbytes()
        elif index >= state_count:
            inputs.append(tensors[index])
    calls = [node for node in nodes if node.op == "call_function"]
    products = sum(_bytes(node) for node in calls if is_product(node.target))
    attention = sum(_bytes(node) for node in calls if is_attention(node.target))
    return Division(inputs, sum(storage_bytes.values()), products, attention)


def _storage(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else id(node)


def _bytes(node: torch.fx.Node) -> int:
    """Return the bytes of a node's first result."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.untyped_storage().nbytes() if isinstance(first, Tensor) else 0


class _Holding:
    """A module with other tensors for parameters and buffers, while the context lasts."""

    def __init__(self, module: nn.Module, tensors: dict[str, Tensor]):
        self._module, self._tensors = module, tensors
        self._before: list[tuple[dict, str, Any]] = []

    def __enter__(self) -> None:
        for name, tensor in self._tensors.items():
            path, _, key = name.rpartition(".")
            module = self._module.get_submodule(path)
            registry: Any = module._parameters if key in module._parameters else module._buffers
            self._before.append((registry, key, registry[key]))
            registry[key] = tensor

    def __exit__(self, *error: Any) -> None:
        for registry, key, value in self._before:
            registry[key] = value
