"""Text documents from the standard library, files of text and of records, folders of them and HF dataset directories.

A source is an iterator of strings in an order that depends only on the source, so every machine with the same
files reads the same documents. Of a file of records each has one document, the text under `data.text_column`; an empty
one is none.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cai_apps.data import files
from cai_apps.data.content import digest_of_files
from cai_apps.data.endings import COLUMNS, DELIMITERS, LINES, LISTED, PACKED, form_of, packing_of
from cai_apps.data.records import records_of
from cai_apps.data.tables import check_column, rows_of
from cai_mesh.errors import DataError

STDLIB = "stdlib"
COLUMN = "text"
"""The column of texts where nothing else is asked for."""
Entry = tuple[str, str | None]
"""The place of a document, and its text; None: the record has none."""
SKIPPED_DIRECTORIES = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "encodings",
}
"""Directories that are not part of the library, or hold its tests or tables of numbers."""


def documents(
    *sources: str,
    column: str = COLUMN,
    limit_bytes: int | None = None,
    on_null: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """The documents of sources, one after the other, cut off after `limit_bytes` of UTF-8 text.

    Args:
        sources: the values of `data.source` and `data.more_sources`.
        column: the value of `data.text_column`.
        limit_bytes: the value of `data.limit_bytes`.
        on_null: a function that is called with the place of each record whose text is null, which is no document.

    Raises:
        DataError: nothing is there, a file is not UTF-8, or a record is broken (named with its file).
    """
    remaining = limit_bytes
    for place, text in entries(*sources, column=column):
        if text is None and on_null is not None:
            on_null(place)
        if remaining is not None and text:
            if remaining <= 0:
                return
            encoded = text.encode(errors="replace")
            if len(encoded) > remaining:
                text = encoded[:remaining].decode(errors="ignore")
            remaining -= len(encoded)
        if text:
            yield text


def entries(*sources: str, column: str = COLUMN) -> Iterator[Entry]:
    """Yield the documents of sources with their places, empty ones and records without a text too.

    Args:
        sources: the values of `data.source` and `data.more_sources`.
        column: the value of `data.text_column`.

    Raises:
        DataError: as for `documents`.
    """
    for source in sources:
        yield from _read(source, column)


def content(*sources: str, cache: str, column: str = COLUMN) -> str:
    """Return a digest of the bytes that the documents of sources are read from, in their order.

    Args:
        sources: the values of `data.source` and `data.more_sources`.
        cache: the directory `data.cache`, where digests of files are kept.
        column: the value of `data.text_column`.

    Raises:
        ConfigError: the cache is another user's, or others may write there.
        DataError: a source is missing, or cannot be read.
    """
    digest = files.joined(_content(source, cache) for source in sources)
    return digest if column == COLUMN else files.joined((digest, column))


def _content(source: str, cache: str) -> str:
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return digest_of_files({f"stdlib/{file.relative_to(root)}": file for file in _stdlib_files()}, cache)
    return files.content_of(source, files_of(source), kind, cache)


def _read(source: str, column: str) -> Iterator[Entry]:
    if source == STDLIB:
        return _read_stdlib()
    if files.is_dataset_directory(source):
        return _read_dataset(Path(source).expanduser(), column)
    return _read_files(files_of(source), column)


def files_of(source: str) -> list[Path]:
    """Return the files of a source in the order in which they are read.

    Raises:
        DataError: there is none.
    """
    expected = f"{STDLIB!r}, a file, a folder or a glob of them, or an HF dataset directory"
    return files.files_of(source, expected=expected, has_texts=True)


OTHER_FORMATS = {
    (".geojson", ".ipynb"): 'write one object a line, {"text": "..."}, into a .jsonl file',
    (".xls", ".xlsx", ".ods"): "save the table as .csv, and name the column as data.text_column",
    (
        ".arrow",
        ".feather",
        ".avro",
        ".orc",
    ): "write the table as .parquet, or load it with the package datasets and name what its save_to_disk writes",
    (".zst", ".zip", ".7z", ".tar", ".tgz", ".rar"): "unpack it",
    (*PACKED,): "name it for what is in it, as in a.txt.gz or a.jsonl.gz, or unpack it",
    (".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".ppt", ".pptx"): "convert it to plain text",
    (
        ".pkl",
        ".pickle",
        ".pt",
        ".pth",
        ".bin",
        ".npy",
        ".npz",
        ".safetensors",
        ".db",
        ".sqlite",
    ): "write its text into .txt or .jsonl files",
}
"""What to do with files of formats that are not text as it is trained on, by the endings of their names."""


def kind(file: Path) -> str:
    """Return how a file is read: ".txt", or the form of its records.

    Raises:
        DataError: the file's name says that it is no text, which it would be trained on as.
    """
    form = form_of(file)
    for endings, fix in OTHER_FORMATS.items():
        if form in endings:
            raise DataError(
                f"{file} is not plain text",
                got=f"a {form} file",
                expected=f"text files, or {', '.join(READERS)} files, of which data.text_column is read",
                cause="its format would be trained on as if it were text",
                fix=fix,
            )
    if form == COLUMNS and packing_of(file):
        raise DataError(f"{file} is a packed table of columns", expected=COLUMNS, fix="unpack it")
    return form if form in READERS else ".txt"


def _read_files(paths: Iterable[Path], column: str) -> Iterator[Entry]:
    for path in paths:
        form = kind(path)
        if form in READERS:
            yield from READERS[form](path, column)
        else:
            with files.opened_text(path) as text:
                yield str(path), text.read()


def read_jsonl(file: Path, column: str = COLUMN) -> Iterator[Entry]:
    """Yield place and text of each line; blank lines are passed over, and null is no text.

    Raises:
        DataError: a line is not a JSON object with a string under the column; names the file and the line number.
    """
    for number, line in files.lines_of(file):
        try:
            text = _text_of(files.parse_line(line), column)
        except (ValueError, TypeError) as error:
            expected = f'one object with a string field, {{"{column}": "..."}}'
            raise files.broken_line(file, number, line, expected=expected, cause=str(error)) from None
        yield f"{file}:{number}", text


def _text_of(value: Any, column: str) -> str | None:
    """Return the text of an object, None where it is null. Raises TypeError where there is neither."""
    if not isinstance(value, dict):
        raise TypeError(f"it is {type(value).__name__}, no object")
    if column not in value:
        names = ", ".join(map(repr, value)) or "none"
        raise TypeError(
            f'the object has no "{column}" field, but {names}; data.text_column names the one that is read'
        )
    text = value[column]
    if not isinstance(text, str | None):
        raise TypeError(f'"{column}" is {type(text).__name__}')
    return text


def _read_listed(file: Path, column: str) -> Iterator[Entry]:
    for record in records_of(file):
        if not isinstance(record.value, dict):
            raise record.value
        try:
            yield record.place, _text_of(record.value, column)
        except TypeError as error:
            raise DataError(f"the object at {record.place} has no text", cause=str(error)) from None


def _read_table(file: Path, column: str) -> Iterator[Entry]:
    for place, row in rows_of(file, column):
        yield place, _cell_text(place, row.get(column), column)


def _cell_text(place: str, text: Any, column: str) -> str | None:
    if isinstance(text, str | None):
        return text
    raise DataError(
        f"{place} has no text in the column {column!r}",
        got=type(text).__name__,
        expected="a column of strings",
        fix="set data.text_column to a column of texts",
    )


READERS: dict[str, Callable[[Path, str], Iterator[Entry]]] = {
    LINES[0]: read_jsonl,
    LISTED: _read_listed,
    COLUMNS: _read_table,
    **dict.fromkeys(DELIMITERS, _read_table),
}
"""What reads the documents of a file of records, by its form."""


def _read_dataset(directory: Path, column: str) -> Iterator[Entry]:
    table = files.dataset_table(directory)
    check_column(directory, column, table.column_names)
    for number, row in enumerate(table):
        place = f"{directory}, row {number}"
        yield place, _cell_text(place, row[column], column)


def _stdlib_files() -> list[Path]:
    files: list[Path] = []
    for folder, inner, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = [
            name for name in inner if name not in SKIPPED_DIRECTORIES
        ]  # with all that is installed there
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _read_stdlib() -> Iterator[Entry]:
    """Sources and language reference, mixed without theme: any prefix is a fair sample of both."""
    from pydoc_data.topics import topics

    readers: dict[str, Callable[[], str]] = {
        f"topic:{name}": partial(topics.__getitem__, name) for name in topics
    }
    for file in _stdlib_files():
        if file.parent.name != "pydoc_data":
            readers[f"{file.parent.name}/{file.name}"] = partial(
                file.read_text, encoding="utf-8", errors="replace"
            )
    for name in sorted(readers, key=_spread):
        yield f"{STDLIB}, {name}", readers[name]()


def _spread(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
