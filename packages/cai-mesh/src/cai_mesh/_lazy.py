"""Names of a package that load their file on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy(package: str, files: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`, whose names come from the files beside it."""
    homes = {name: file for file, names in files.items() for name in names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get
