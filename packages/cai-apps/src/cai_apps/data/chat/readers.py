"""Sources of conversations and preferences to records: files, and what is made here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from cai_apps.data import files
from cai_apps.data.chat import arithmetic
from cai_apps.data.chat.cells import read_cells
from cai_apps.data.endings import COLUMNS, DELIMITERS, LINES, LISTED, PACKED, form_of, packing_of
from cai_apps.data.records import READERS, Record, records_of
from cai_apps.data.tables import without_nulls
from cai_mesh.errors import DataError

KINDS = (*LINES, LISTED, COLUMNS, *DELIMITERS)


def read_records(*sources: str) -> Iterator[Record]:
    """Yield the records of files of `KINDS`, of globs and folders of them, and directories of datasets.save_to_disk.

    A line that cannot be read is yielded as its error, and the next one follows.

    Args:
        sources: the values of `data.source` and `data.more_sources`, which are read in this order.

    Raises:
        DataError: there is no such file, its kind is none of these, or it cannot be read from some place on.
    """
    for source in sources:
        yield from _read_source(source)


def _read_source(source: str) -> Iterator[Record]:
    if source == arithmetic.SOURCE:
        for number, value in enumerate(arithmetic.conversations()):
            yield Record(f"{source}, conversation {number}", value)
        return
    paths = record_files(source)
    if files.is_dataset_directory(source):
        directory = Path(source).expanduser()
        for number, row in enumerate(files.dataset_table(directory)):
            yield Record(f"{directory}, row {number}", without_nulls(row))
        return
    for path in paths:
        for record in records_of(path):
            yield read_cells(record) if form_of(path) in DELIMITERS else record


def record_files(source: str) -> list[Path]:
    """Return the files of a source of conversations, in their order.

    Raises:
        DataError: there is none, or one of another kind.
    """
    expected = (
        f"a file, a glob or a folder of files ({', '.join(KINDS)}), an HF dataset directory, or what is made here: "
        f"{arithmetic.SOURCE!r} for conversations, 'preferences' for pairs"
    )
    paths = files.files_of(source, expected=expected, has_texts=False)
    if not files.is_dataset_directory(source):
        for path in paths:
            kind(path)
    return paths


def content(*sources: str, cache: str) -> str:
    """Return a digest of the bytes that the records of sources are read from.

    Args:
        sources: the values of `data.source` and `data.more_sources`.
        cache: the directory `data.cache`, where digests of files are kept.
    """
    return files.joined(_content(source, cache) for source in sources)


def _content(source: str, cache: str) -> str:
    if source == arithmetic.SOURCE:
        return hashlib.sha256(json.dumps(list(arithmetic.conversations())).encode()).hexdigest()
    return files.content_of(source, record_files(source), kind, cache)


def kind(path: Path) -> str:
    """Return how a file is read: by the ending that `form_of` has of it.

    Raises:
        DataError: it is of another kind.
    """
    form = form_of(path)
    if form not in READERS or (form == COLUMNS and packing_of(path)):
        raise DataError(
            f"{path} is no file of conversations",
            got=f"a {path.suffix.lower() or 'file without an ending'}",
            expected=f"{', '.join(KINDS)}; all but {COLUMNS} also as {', '.join(PACKED)}",
            fix="write one conversation a line into a .jsonl file",
        )
    return form
