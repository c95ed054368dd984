"""Small verbs of scripts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cai_apps.booster.launch import rank_device, seed_all

__all__ = [
    "conditional_context",
    "disposable",
    "ensure_path_exists",
    "free_storage",
    "get_current_device",
    "is_ddp_ignored",
    "set_seed",
]


def get_current_device() -> torch.device:
    """Return this rank's device."""
    return rank_device()


def set_seed(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch."""
    seed_all(seed)


def ensure_path_exists(filename: str) -> None:
    """Make the directory of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def conditional_context(context_manager: Any, enable: bool = True) -> AbstractContextManager[Any]:
    """Return a context, or one that does nothing."""
    return context_manager if enable else nullcontext()


def is_ddp_ignored(param: Tensor) -> bool:
    """Return False: nothing is left out of the average over ranks but what is frozen."""
    return False


def disposable(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs once and does nothing from then on."""
    used: list[bool] = []

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if used:
            return None
        used.append(True)
        return func(*args, **kwargs)

    return call


def free_storage(tensor: Tensor) -> None:
    """Free a tensor's memory."""
    tensor.untyped_storage().resize_(0)
