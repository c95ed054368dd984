"""The advertised names of packages that one of their modules takes: `python shadowed_names.py PACKAGE...` prints them.

`import package.offload` makes `offload` of the package that module, also where the package advertises a function of
this name. A module does so to the package that it lies in, so the modules of each package with an `__all__` are enough.
Packages are named after those that they import: what is imported already has been looked at.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType


def faces(package: ModuleType) -> Iterator[ModuleType]:
    """The package and its rooms, if they advertise something."""
    if hasattr(package, "__all__"):
        yield package
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if info.ispkg:
            yield from faces(importlib.import_module(info.name))


def shadows(face: ModuleType) -> Iterator[str]:
    """What is wrong once each module of `face` has been imported, in turn."""
    advertised = {name: getattr(face, name) for name in face.__all__}
    for name, value in advertised.items():
        if isinstance(value, ModuleType) and callable(getattr(value, name, None)):
            yield f"{face.__name__}.{name} is a module, of a file with a function of this name"
    for info in pkgutil.iter_modules(face.__path__, f"{face.__name__}."):
        importlib.import_module(info.name)
        for name, value in advertised.items():
            if getattr(face, name) is not value:
                yield f"{face.__name__}.{name} is {getattr(face, name)!r} after import {info.name}"


if __name__ == "__main__":
    for package in sys.argv[1:]:
        for face in list(faces(importlib.import_module(package))):
            for line in shadows(face):
                print(line)
