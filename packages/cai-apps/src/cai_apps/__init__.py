"""Large-model training from one recipe: config, data, loop, launcher and the command `cai`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["Config", "export", "plan", "recipes", "train"]

if TYPE_CHECKING:
    from cai_apps import recipes
    from cai_apps.config import Config
    from cai_apps.exporting import export
    from cai_apps.planner.plan import plan
    from cai_apps.training import train

_HOMES = {"Config": "config", "export": "exporting", "plan": "planner.plan", "train": "training"}


def __getattr__(name: str) -> object:
    """Loads a public name on use, so that `cai --help` needs neither torch nor transformers."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"cai_apps.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'cai_apps' has no attribute {name!r}")
