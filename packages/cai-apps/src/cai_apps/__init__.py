"""Large-model training from one recipe: config, data, loop, launcher and the command `cai`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["Config", "export", "plan", "recipes", "train"]

if TYPE_CHECKING:
    from cai_apps import recipes
    from cai_apps.applications.language.config import Config
    from cai_apps.applications.language.export import export
    from cai_apps.applications.language.plan import plan
    from cai_apps.run.files.directory import RunDirectory

_HOMES = {
    "Config": "applications.language.config",
    "export": "applications.language.export",
    "plan": "applications.language.plan",
}


def train(config: Any, *, label: str = "run") -> RunDirectory:
    """Trains as `config` says, that of any application, and returns the run's directory.

    Under a launcher (RANK is set) this process is one of its ranks; otherwise the ranks are started here.

    Raises:
        CaiError: anything the user can fix; before any rank starts where it can be known by then.
    """
    from cai_apps import applications

    return applications.of(config).train(config, label, None)


def __getattr__(name: str) -> object:
    """Loads a public name on use, so that `cai --help` needs neither torch nor transformers."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"cai_apps.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'cai_apps' has no attribute {name!r}")
