"""Import lines of a script, rewritten to the paths of this package; all else stays as it is, letter by letter."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

THEIRS = "colossalai"
OURS = "cai_apps.compat.colossalai"


@dataclass(frozen=True)
class Edit:
    """A piece of a text that is replaced: from a place to another, counted in characters."""

    start: int
    stop: int
    text: str


def rewritten(source: str) -> str:
    """Return a script with its import lines rewritten, wherever they stand.

    Args:
        source: the text of the script.

    Raises:
        SyntaxError: it is no Python.
    """
    edits = sorted(_edits(source), key=lambda edit: edit.start, reverse=True)
    for edit in edits:
        source = source[: edit.start] + edit.text + source[edit.stop :]
    return source


def _edits(source: str) -> Iterator[Edit]:
    starts = _line_starts(source)
    lines = source.splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        """Return the place of a line and a column, which counts bytes."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        start, stop = (
            place(node.lineno, node.col_offset),
            place(node.end_lineno or 0, node.end_col_offset or 0),
        )
        if isinstance(node, ast.ImportFrom):
            if node.level == 0 and is_theirs(node.module):
                match = re.compile(rf"from[\s\\]+({THEIRS})\b").match(source, start, stop)
                assert match is not None
                yield Edit(match.start(1), match.end(1), OURS)
        elif any(is_theirs(alias.name) for alias in node.names):
            yield Edit(start, stop, f"import {', '.join(_named(alias) for alias in node.names)}")


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def is_theirs(module: str | None) -> bool:
    """Return whether a module's path is one of the other library."""
    return module is not None and (module == THEIRS or module.startswith(f"{THEIRS}."))


def ours(module: str) -> str:
    """Return the path here of a module there."""
    return OURS + module.removeprefix(THEIRS)


def _named(alias: ast.alias) -> str:
    """Return one name of an import statement. `import a.b` binds `a`, so that is bound beside."""
    if not is_theirs(alias.name):
        return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
    if alias.asname is not None:
        return f"{ours(alias.name)} as {alias.asname}"
    package = f"{OURS} as {THEIRS}"
    return package if alias.name == THEIRS else f"{ours(alias.name)}, {package}"
