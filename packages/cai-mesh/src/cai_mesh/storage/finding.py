"""The modules of a model that are units: blocks, large layers, and the model itself for the rest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout.record import canonical_name


def blocks(model: nn.Module) -> dict[nn.Module, list[tuple[str, nn.Parameter]]]:
    """The parameters of a model by unit: each outermost element of an `nn.ModuleList`, and the model for the rest.

    Names are fully qualified and canonical. A parameter that two blocks share belongs to the model; a block that
    stands twice in a list is one. Lists in a list are never called themselves, so their elements are the blocks.
    Blocks are in the order of their first parameter; the model, if it has parameters of its own, comes last.
    """
    inside: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(prefix.startswith(p + ".") for p in inside):
            called = ((name, child) for name, child in module._modules.items() if _is_called(child))
            inside.update(
                {f"{prefix}.{name}".lstrip("."): child for name, child in called if child is not None}
            )
    homes: dict[int, nn.Module] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        block = next((inside[p] for p in _prefixes(name) if p in inside), model)
        home = homes.setdefault(id(param), block)
        if home is not block:
            homes[id(param)] = model
        first.setdefault(id(param), (canonical_name(name, param), param))
    by_block: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {}
    for key, entry in first.items():
        by_block.setdefault(homes[key], []).append(entry)
    if model in by_block:
        by_block[model] = by_block.pop(model)
    return by_block


ALONE_ELEMENTS = 8 * 1024 * 1024
"""A layer outside the blocks that is at least this large is a unit of its own."""


def units(model: nn.Module) -> dict[nn.Module, list[tuple[str, nn.Parameter]]]:
    """`blocks`, with large `nn.Embedding` and `nn.Linear` layers outside them as units of their own.

    So the input embedding is not held while the output layer runs. A layer whose parameter another module holds too
    stays with the model. The model comes last, and always comes: its forward is the pass.
    """
    by_unit = blocks(model)
    rest = {id(p): (name, p) for name, p in by_unit.pop(model, [])}
    holders: dict[int, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                holders[id(param)] = holders.get(id(param), 0) + 1
    for module in model.modules():
        layer_params = [
            rest[id(p)] for p in module._parameters.values() if id(p) in rest and holders[id(p)] == 1
        ]
        if type(module) in (nn.Embedding, nn.Linear) and module is not model and _large(layer_params):
            by_unit[module] = layer_params
            for _, param in layer_params:
                del rest[id(param)]
    order = {id(p): i for i, p in enumerate(model.parameters())}
    ordered = sorted(by_unit.items(), key=lambda item: min(order[id(p)] for _, p in item[1]))
    return {**dict(ordered), model: list(rest.values())}


def _large(params: list[tuple[str, nn.Parameter]]) -> bool:
    return sum(p.numel() for _, p in params) >= ALONE_ELEMENTS


def _is_called(module: nn.Module | None) -> bool:
    return module is not None and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))


def check_parameters(params: Iterable[tuple[str, torch.Tensor]], *, meta: bool = False) -> None:
    """Raise `PlanError` for parameters that cannot live in a chunk: integer, complex, sparse, DTensor, meta."""
    for name, param in params:
        if not param.is_floating_point() or param.layout is not torch.strided:
            raise PlanError(
                f"parameter {name!r} cannot be sharded",
                got=f"{param.dtype}, {param.layout}",
                expected="a dense real floating-point tensor",
                fix="register it as a buffer",
            )
        if (param.is_meta and not meta) or hasattr(param, "to_local"):
            raise PlanError(
                f"parameter {name!r} cannot be moved into a chunk",
                got="a meta tensor" if param.is_meta else "a DTensor",
                expected="a local tensor with memory, and a Layout attached where it is a part",
            )
