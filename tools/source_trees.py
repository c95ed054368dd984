"""The sources of all packages and their syntax trees, each parsed once for all rules that read them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "packages"
SOURCES = sorted(PACKAGES.glob("*/src/**/*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())
