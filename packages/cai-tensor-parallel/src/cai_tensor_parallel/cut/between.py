"""Refusal of what reaches a row-cut layer without passing a column cut: its gradient would be one rank's part of it.

The graph of a row-cut layer's input is walked back once, at the first forward that records one. Column-cut layers end
the walk, whole ones that sum the gradients of their results, and copies whose gradients are summed. A parameter found
on the way acts on one rank's features and would get the gradient of these alone; so would a result that is whole on
every rank. Cut parameters are as they should be.

Between pipeline stages a graph ends: what a stage sends is looked at there, and says with it whether it is a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import attach, record_of
from cai_mesh.trial import tensors_of
from cai_tensor_parallel.modes.one_d import Column, Row
from cai_tensor_parallel.modes.whole import Picked, Tail

Report = Callable[[str, list[torch.Tensor]], None]
"""Called with a row-cut layer's name and the parameters before it; with none for something else that is whole."""


def watch(model: nn.Module, report: Report) -> None:
    """Look at what comes into every row-cut layer of a model, at its first forward with a graph."""
    for name, module in model.named_modules():
        rule = module.__dict__.get("cai_rule")
        if isinstance(rule, Row) and not rule.split:
            _watch(module, name, report)


def _watch(module: nn.Module, name: str, report: Report) -> None:
    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not args or args[0].grad_fn is None:
            return
        module._forward_pre_hooks.pop(
            key, None
        )  # of this module, which may be a copy of the one first watched
        leaves = list(_whole_before(args[0].grad_fn))
        if leaves:
            report(name, [leaf for leaf in leaves if leaf is not None])

    key = module.register_forward_pre_hook(look).id


def _whole_before(root: Any | None) -> Iterator[torch.Tensor | None]:
    """Leaves reached from a node of the graph before any column cut; None for something else that is whole."""
    visited, waiting = {root}, [] if root is None else [root]
    while waiting:
        node = waiting.pop()
        leaf, rule = getattr(node, "variable", None), getattr(node, "rule", None)
        if leaf is not None:
            if not _is_cut(leaf):
                yield leaf
        elif isinstance(rule, Row) or type(node).__name__ == "_ReduceFromBackward":
            yield None
        elif not isinstance(rule, Column | Picked | Tail) and type(node).__name__ != "_CopyToBackward":
            ahead = {after for after, _ in node.next_functions if after is not None} - visited
            visited |= ahead
            waiting += ahead


def _is_cut(leaf: torch.Tensor) -> bool:
    """Whether a tensor at the end of a graph is a cut parameter, or a part that another stage has sent."""
    record = record_of(leaf)
    return record.layout is not None or record.part


def mark_parts(model: nn.Module) -> None:
    """Let a model of stages mark, of what a stage sends, the tensors before which nothing whole learns."""

    def mark(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stages = getattr(module, "cai_stages", None)
        looks = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if stages is None or not stages.hands_on or not looks:
            return
        for sent in tensors_of(output).values():
            handed_on = sent.grad_fn is None and sent.requires_grad  # as it was received
            if not handed_on and next(_whole_before(sent.grad_fn), sent) is sent:
                attach(sent, part=True)

    model.register_forward_hook(mark)


def owners(model: nn.Module, leaves: Sequence[torch.Tensor]) -> list[str]:
    """Names of the modules that hold parameters."""
    leaf_ids = {id(leaf) for leaf in leaves}
    return [
        name
        for name, module in model.named_modules()
        if any(id(p) in leaf_ids for p in module._parameters.values())
    ]


def refusal(model: nn.Module, name: str, leaves: Sequence[torch.Tensor]) -> PlanError:
    """The error that names what was found before the row-cut layer `name`."""
    leaf_ids = {id(leaf) for leaf in leaves}
    names = [n for n, p in model.named_parameters() if id(p) in leaf_ids]
    return PlanError(
        f"before {name}, which takes one rank's features, there is something whole",
        got=", ".join(names) or "a result that is the same on every rank",
        expected="column-cut layers, and between them and this one only what acts feature by feature",
        cause="each rank would compute its part of the gradient, and nothing sums them",
        fix="give the module the role replicated_with_grad_allreduce, or cut what it computes",
    )
