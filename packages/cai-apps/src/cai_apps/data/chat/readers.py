"""Files to records, lazily, each with the line or row where it stands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cai_apps.data import files
from cai_apps.data.chat import arithmetic
from cai_apps.data.chat.values import LETTERS, shown
from cai_mesh.errors import DataError

LISTED, ROWS = ".json", ".parquet"
KINDS = (*files.LINES, LISTED, ROWS)
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


def read_records(source: str) -> Iterator[Record]:
    """Yield the records of a .jsonl, .json or .parquet file, a glob, or a directory of datasets.save_to_disk.

    A line that cannot be read is yielded as its error, and the next one follows.

    Raises:
        DataError: there is no such file, its kind is none of these, or it cannot be read from some place on.
    """
    if source == arithmetic.SOURCE:
        for number, value in enumerate(arithmetic.conversations()):
            yield Record(f"{source}, conversation {number}", value)
        return
    paths = record_files(source)
    if files.is_dataset_directory(source):
        directory = Path(source).expanduser()
        yield from _rows(directory, iter(files.dataset_table(directory)))
        return
    for path in paths:
        yield from READERS[kind(path)](path)


def record_files(source: str) -> list[Path]:
    """Return the files of a source of conversations, in their order.

    Raises:
        DataError: there is none, or one of another kind.
    """
    expected = (
        f"a file or a glob of files ({', '.join(KINDS)}), an HF dataset directory, or what is made here: "
        f"{arithmetic.SOURCE!r} for conversations, 'preferences' for pairs"
    )
    paths = files.files_of(source, example="*.jsonl", expected=expected)
    if not files.is_dataset_directory(source):
        for path in paths:
            kind(path)
    return paths


def content(source: str, cache: str) -> str:
    """Return a digest of the bytes that a source's records are read from.

    Args:
        source: the value of `data.source`.
        cache: the directory `data.cache`, where digests of files are kept.
    """
    if source == arithmetic.SOURCE:
        return hashlib.sha256(json.dumps(list(arithmetic.conversations())).encode()).hexdigest()
    return files.content_of(source, record_files(source), kind, cache)


def kind(path: Path) -> str:
    """Return how a file is read: ".jsonl", ".json" or ".parquet".

    Raises:
        DataError: it is of another kind.
    """
    ending = path.suffix.lower()
    if ending not in KINDS:
        raise DataError(
            f"{path} is no file of conversations",
            got=f"a {ending or 'file without an ending'}",
            expected=", ".join(KINDS),
            fix="write one conversation a line into a .jsonl file",
        )
    return files.LINES[0] if ending in files.LINES else ending


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
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text", got=str(error), fix="convert the file") from None
    line, position = 1, 0
    for start, value in _elements(path, text):
        line, position = line + text.count("\n", position, start), start
        place = f"{path}:{line}"
        if not isinstance(value, dict):
            value = DataError(f"the element at {place} is no object", got=shown(value), expected=OBJECT)
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


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path} is a parquet file and the package 'pyarrow' is not installed",
            fix="pip install 'cai-apps[data]'",
        ) from None
    try:
        opened = parquet.ParquetFile(path)
        batches = opened.iter_batches()
        yield from _rows(path, (row for batch in batches for row in batch.to_pylist()))
    except DataError:
        raise
    except (OSError, ValueError) as error:  # those of pyarrow are such
        raise DataError(f"{path} is damaged", expected="a parquet file", cause=str(error)) from None


def _rows(path: Path, rows: Iterable[Any]) -> Iterator[Record]:
    """Yield the rows of a table, without what columns of one type fill in where an object has no such key."""
    for number, row in enumerate(rows):
        yield Record(f"{path}, row {number}", _without_nulls(row))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    files.LINES[0]: _read_lines,
    LISTED: _read_json,
    ROWS: _read_parquet,
}
