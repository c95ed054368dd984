"""Texts with their classes, of files or of the standard library."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cai_apps.applications.classification.config import MODULES, Data
from cai_apps.data import files
from cai_apps.data.endings import form_of
from cai_apps.data.records import READERS, records_of
from cai_apps.data.tables import without_nulls
from cai_mesh.errors import DataError, did_you_mean

NAMES = ("argparse", "asyncio", "email", "http", "logging", "multiprocessing", "unittest", "xml")
"""Modules of the standard library whose functions are told apart."""
LETTERS = 60
"""Letters of a value that an error shows."""
EXPECTED = (
    f"a file of records ({', '.join(READERS)}), a folder or a glob of such, a directory written by "
    f"datasets.save_to_disk, or {MODULES!r}"
)


class Labelled(NamedTuple):
    """A text, or two, and the class.

    Args:
        first: the text.
        second: the second text; None: there is none.
        label: the class, as the record has it.
    """

    first: str
    second: str | None
    label: str | int


def labelled_texts(data: Data, source: str) -> Iterator[Labelled]:
    """Yield the texts of a source.

    Raises:
        DataError: there is no such file, or a record is broken or lacks a field; the first one is named by its line.
    """
    if source == MODULES:
        yield from _functions()
        return
    rows = _dataset_rows(data, source) if files.is_dataset_directory(source) else _rows(source)
    for place, row in rows:
        yield _labelled(place, row, data)


def _rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in texts_files(source):
        for record in records_of(file):
            value = record.value
            if not isinstance(value, dict):  # the error that says why there is none
                raise value
            yield record.place, value


def _dataset_rows(data: Data, source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows of a directory of `datasets`; classes that it has names for, by these."""
    table = files.dataset_table(Path(source).expanduser())
    names = getattr(table.features.get(data.label), "names", None)
    for number, row in enumerate(table):
        label = row.get(data.label)
        if names is not None and isinstance(label, int) and label >= 0:
            row = row | {data.label: names[label]}
        yield f"{source}, row {number}", without_nulls(row)


def texts_files(source: str) -> list[Path]:
    """Return the files of a source of records.

    Raises:
        DataError: there is none, or one of a form that has no fields.
    """
    listed = files.files_of(source, expected=EXPECTED, has_texts=False)
    for file in listed:
        if form_of(file) not in READERS and not files.is_dataset_directory(source):
            raise DataError(f"{file} has no records with fields", expected=EXPECTED)
    return listed


def content(data: Data, source: str) -> str:
    """Return a digest of a source's texts, and of the fields that are read."""
    if source == MODULES:
        return files.joined(["\n".join(f"{text.label}\n{text.first}" for text in _functions()), MODULES])
    digest = files.content_of(source, texts_files(source), form_of, data.cache)
    return files.joined([digest, data.text, data.second_text or "", data.label])


def _labelled(place: str, record: dict[str, Any], data: Data) -> Labelled:
    texts = [_text(place, record, name) for name in (data.text, data.second_text) if name is not None]
    label = _field(place, record, data.label)
    if isinstance(label, bool) or not isinstance(label, (str, int)):
        raise DataError(
            f"the class at {place} is neither a name nor a number",
            got=f"{data.label}: {label!r}"[:LETTERS],
            expected="a text, or a whole number from 0",
        )
    return Labelled(texts[0], texts[1] if len(texts) > 1 else None, label)


def _text(place: str, record: dict[str, Any], name: str) -> str:
    value = _field(place, record, name)
    if not isinstance(value, str):
        raise DataError(
            f"the field {name!r} at {place} is no text", got=f"{type(value).__name__} {value!r}"[:LETTERS]
        )
    return value


def _field(place: str, record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise DataError(
            f"the record at {place} has no {name!r}",
            got=f"the fields {', '.join(map(repr, record))}" if record else "no field",
            fix=f"set data.text, data.second_text or data.label; {did_you_mean(name, list(record))}",
        )
    return record[name]


def _functions() -> Iterator[Labelled]:
    """Yield functions of the standard library, without their names' module, by the module that they are from."""
    for name in NAMES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # an interpreter without it, as without Tk
            continue
        place = Path(spec.origin)
        for file in sorted(place.parent.glob("*.py")) if place.name == "__init__.py" else [place]:
            text = file.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                    yield Labelled(ast.get_source_segment(text, node) or "", None, name)
