"""Files to records, lazily, each with the line or row where it stands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cai_apps.data import files
from cai_apps.data.endings import COLUMNS, DELIMITERS, LINES, LISTED, form_of
from cai_apps.data.tables import rows_of
from cai_mesh.errors import DataError

LETTERS = 80
"""Letters of a value that an error shows."""
OBJECT = "one JSON object"


@dataclass(frozen=True)
class Record:
    """One entry of a file.

    Args:
        place: the file and the number of its line or row.
        value: the object, or why there is none.
    """

    place: str
    value: dict[str, Any] | DataError


def records_of(path: Path) -> Iterator[Record]:
    """Yield the records of a file whose form is one of `READERS`.

    A line that cannot be read is yielded as its error, and the next one follows.

    Raises:
        DataError: the file cannot be read from some place on.
    """
    return READERS[form_of(path)](path)


def _read_lines(path: Path) -> Iterator[Record]:
    for number, line in files.lines_of(path):
        yield Record(f"{path}:{number}", _object_of(path, number, line))


def _object_of(path: Path, number: int, line: bytes) -> dict[str, Any] | DataError:
    """Return the object of a line, or the error that says why there is none."""
    try:
        value = files.parse_line(line)
    except ValueError as error:
        return files.broken_line(path, number, line, expected=OBJECT, cause=str(error))
    if isinstance(value, dict):
        return value
    return files.broken_line(path, number, line, expected=OBJECT, cause=f"it is {type(value).__name__}")


def _read_json(path: Path) -> Iterator[Record]:
    """Yield the elements of a file that is one list; where it is none, its lines."""
    first = next((line.lstrip()[:1] for _, line in files.lines_of(path)), b"")
    if first != b"[":
        yield from _read_lines(path)
        return
    with files.opened_text(path) as stream:
        text = stream.read()
    line, position = 1, 0
    for start, value in _elements(path, text):
        line, position = line + text.count("\n", position, start), start
        place = f"{path}:{line}"
        if not isinstance(value, dict):
            value = DataError(
                f"the element at {place} is no object",
                got=f"{type(value).__name__} {value!r}"[:LETTERS],
                expected=OBJECT,
            )
        yield Record(place, value)


def _elements(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield position and value of each element of a list.

    Raises:
        DataError: the text is broken; names the line.
    """
    decoder, position = json.JSONDecoder(), text.index("[") + 1
    is_first = True
    while True:
        position = _skip_blank(text, position)
        if text[position : position + 1] == "]" and is_first:
            return
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise _broken_list(path, text, getattr(error, "pos", position), str(error)) from None
        yield position, value
        is_first, position = False, _skip_blank(text, end)
        if text[position : position + 1] == "]":
            return
        if text[position : position + 1] != ",":
            raise _broken_list(path, text, position, "no comma after an element")
        position += 1


def _skip_blank(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\r", "\n"):
        position += 1
    return position


def _broken_list(path: Path, text: str, position: int, cause: str) -> DataError:
    return DataError(
        f"broken JSON at {path}:{text.count(chr(10), 0, position) + 1}",
        got=text[position : position + LETTERS] or "the end of the file",
        expected="a list of objects",
        cause=cause,
        fix="correct it there; what follows cannot be read",
    )


def _read_table(path: Path) -> Iterator[Record]:
    for place, row in rows_of(path):
        yield Record(place, row)


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    LINES[0]: _read_lines,
    LISTED: _read_json,
    COLUMNS: _read_table,
    **dict.fromkeys(DELIMITERS, _read_table),
}
"""What reads a file, by its form."""
