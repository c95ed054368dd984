"""Every room of an operation opens with its formula."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import cai_kernels

ROOMS = [path.parent for path in Path(cai_kernels.__file__).parent.glob("*/reference.py")]


def test_rooms_open_with_a_formula():
    openings = {
        room.name: ast.get_docstring(ast.parse((room / "__init__.py").read_text()), clean=False)
        for room in ROOMS
    }
    assert openings
    assert not [name for name, text in openings.items() if not re.search(r"\n\n {4}\S.* (=|<-) ", text or "")]
