"""Which modules of a model are cut by vocabulary: its input embedding, its output layer, and what is tied to them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

ENDS = {
    "get_input_embeddings": (nn.Embedding, "vocab_embedding"),
    "get_output_embeddings": (nn.Linear, "vocab_head"),
}
"""How transformers names the two ends, what can be cut of each, and its role."""


def vocabulary_ends(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """("get_input_embeddings" or "get_output_embeddings", module) of the ends that a model has."""
    for getter in ENDS:
        try:
            module = getattr(model, getter, lambda: None)()
        except RuntimeError:  # a class of transformers without such an end
            continue
        if isinstance(module, nn.Module):
            yield getter, module


def vocabulary_roles(model: nn.Module) -> dict[str, str]:
    """Roles of the two ends and of all embeddings and linear layers that share a parameter with them, by name.

    An end that shares one with anything else has no role: it stays whole.
    """
    owners = [
        (name, m) for name, m in model.named_modules() if any(p is not None for p in m._parameters.values())
    ]
    roles: dict[str, str] = {}
    for getter, end in vocabulary_ends(model):
        tied = _tied(end, [module for _, module in owners])
        if isinstance(end, ENDS[getter][0]) and all(isinstance(m, nn.Embedding | nn.Linear) for m in tied):
            for name, module in owners:
                if any(module is each for each in tied):
                    roles[name] = "vocab_embedding" if isinstance(module, nn.Embedding) else "vocab_head"
    return roles


def keeps_another_bias(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a module of modules holds a bias that is one of theirs, as the heads of BERT's kind do."""
    inside = (p for child in module.children() for p in child.parameters())
    return parameter.dim() == 1 and any(p is parameter for p in inside)


def _tied(end: nn.Module, owners: list[nn.Module]) -> list[nn.Module]:
    """A module and those that share parameters with it, or with one that does."""
    tied, shared, before = [end], set[int](), -1
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
