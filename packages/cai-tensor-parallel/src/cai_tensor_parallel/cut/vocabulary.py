"""Modules that are cut by vocabulary: a model's input embedding, its output layer, and what is tied to them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from cai_mesh.adapters import BASE, base_layer
from cai_mesh.layout import canonical_name

ENDS = {
    "get_input_embeddings": (nn.Embedding, "vocab_embedding"),
    "get_output_embeddings": (nn.Linear, "vocab_head"),
}
"""Names that transformers has for the two ends, what can be cut of each, and its role."""


def vocabulary_ends(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """("get_input_embeddings" or "get_output_embeddings", module) of the ends that a model has.

    Of an end with adapters it is the layer beside which they stand.
    """
    for getter in ENDS:
        try:
            module = getattr(model, getter, lambda: None)()
        except RuntimeError:  # a class of transformers without such an end
            continue
        if isinstance(module, nn.Module):
            yield getter, base_layer(module)


def vocabulary_roles(model: nn.Module) -> dict[str, str]:
    """Roles of the two ends and of all embeddings and linear layers that share a parameter with them, by name.

    An end that shares one with anything else has no role: it stays whole. Of one on another pipeline stage, what is
    tied to it is found by the name that it has from there.
    """
    owners = [
        (name, m) for name, m in model.named_modules() if any(p is not None for p in m._parameters.values())
    ]
    roles: dict[str, str] = {}
    for getter, end in vocabulary_ends(model):
        elsewhere = next(end.parameters(), None) is None
        ends = _tied_to_another_stage(model, end, owners) if elsewhere else [end]
        tied = _tied(ends, [module for _, module in owners])
        class_fits = elsewhere or isinstance(end, ENDS[getter][0])
        if class_fits and all(isinstance(m, nn.Embedding | nn.Linear) for m in tied):
            for name, module in owners:
                if any(module is member for member in tied):
                    name = name.removesuffix(f".{BASE}")
                    roles[name] = "vocab_embedding" if isinstance(module, nn.Embedding) else "vocab_head"
    return roles


def keeps_another_bias(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a module of modules holds a bias that is one of theirs, as the heads of BERT's kind do."""
    inside = (p for child in module.children() for p in child.parameters())
    return parameter.dim() == 1 and any(p is parameter for p in inside)


def _tied_to_another_stage(
    model: nn.Module, end: nn.Module, owners: list[tuple[str, nn.Module]]
) -> list[nn.Module]:
    """The modules with copies of a parameter that another pipeline stage names after `end`."""
    names = {name for name, module in model.named_modules(remove_duplicate=False) if module is end}
    return [
        module
        for name, module in owners
        for local, p in module._parameters.items()
        if p is not None and canonical_name(f"{name}.{local}", p).rpartition(".")[0] in names
    ]


def _tied(ends: list[nn.Module], owners: list[nn.Module]) -> list[nn.Module]:
    """Modules and those that share parameters with them, or with one that does."""
    tied, shared, before = ends, set[int](), -1
    while before != len(tied):
        before = len(tied)
        shared |= {id(p) for module in tied for p in module._parameters.values() if p is not None}
        tied = [
            module
            for module in owners
            if any(
                id(p) in shared and not keeps_another_bias(module, p)
                for p in module._parameters.values()
                if p is not None
            )
        ]
    return tied
