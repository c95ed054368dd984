"""Counts the parameters one token goes through: of experts, those that it visits."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["COUNTS", "VISITED", "visited_share", "visits_of"]

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
VISITED = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
"""The names in configs of transformers for the number of a layer's experts, and of those that a token visits."""


def visited_share(config: Any, name: str, parameter: torch.Tensor) -> float:
    """The share of a parameter's elements that one token is multiplied with.

    Args:
        config: the model's, of transformers; any other object says nothing of experts.
        name: the parameter's name in the model.
        parameter: the parameter of one expert, or stacked for all of a layer's, [experts, ...].

    Returns 1 for what is of no expert, and where the config does not say how many a token visits.
    """
    experts, visited = _number(_text(config), COUNTS), visits_of(config)
    if not experts or not visited:
        return 1.0
    stacked = parameter.ndim == 3 and parameter.shape[0] == experts
    return visited / experts if stacked or ".experts." in f".{name}." else 1.0


def visits_of(config: Any) -> int | None:
    """Return the number of experts that a token visits in a layer; None where the config does not say it."""
    return _number(_text(config), VISITED)


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _number(config: Any, names: tuple[str, ...]) -> int | None:
    return next((n for name in names if isinstance(n := getattr(config, name, None), int)), None)
