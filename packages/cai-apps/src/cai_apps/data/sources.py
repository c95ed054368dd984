"""Text documents from the standard library, text files, JSONL files and HF dataset directories.

A source is an iterator of strings in an order that depends only on the source, so every machine with the same
files reads the same documents.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from cai_apps.data.content import digest_of_files
from cai_apps.data.files import (
    LINES,
    broken_line,
    content_of,
    dataset_table,
    files_of,
    is_dataset_directory,
    lines_of,
    parse_line,
)
from cai_mesh.errors import DataError

STDLIB = "stdlib"
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


def documents(source: str, *, limit_bytes: int | None = None) -> Iterator[str]:
    """The documents of `data.source`, cut off after `limit_bytes` of UTF-8 text.

    Raises:
        DataError: nothing is there, a file is not UTF-8, or a JSONL line is broken (named with its file).
    """
    left = limit_bytes
    for text in _read(source):
        if left is not None:
            if left <= 0:
                return
            encoded = text.encode(errors="replace")
            if len(encoded) > left:
                text = encoded[:left].decode(errors="ignore")
            left -= len(encoded)
        if text:
            yield text


def content(source: str, cache: str) -> str:
    """Return a digest of the bytes that a source's documents are read from, in their order.

    Args:
        source: the value of `data.source`.
        cache: the directory `data.cache`, where digests of files are kept.

    Raises:
        ConfigError: the cache is another user's, or others may write there.
        DataError: the source is missing, or cannot be read.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return digest_of_files({f"stdlib/{file.relative_to(root)}": file for file in _stdlib_files()}, cache)
    return content_of(source, _files_of(source), kind, cache)


def _read(source: str) -> Iterator[str]:
    if source == STDLIB:
        return _read_stdlib()
    if is_dataset_directory(source):
        return _read_dataset(Path(source).expanduser())
    return _read_files(_files_of(source))


def _files_of(source: str) -> list[Path]:
    expected = f"{STDLIB!r}, a text or .jsonl file, a glob, or an HF dataset directory"
    return files_of(source, example="**/*.txt", expected=expected)


OTHER_FORMATS = {
    (".json", ".geojson", ".ipynb"): 'write one object a line, {"text": "..."}, into a .jsonl file',
    (
        ".csv",
        ".tsv",
        ".xls",
        ".xlsx",
        ".ods",
    ): 'write each row\'s text as a line {"text": "..."} of a .jsonl file',
    (
        ".parquet",
        ".arrow",
        ".feather",
        ".avro",
        ".orc",
    ): "load it with the package datasets and name what its save_to_disk writes",
    (".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tar", ".tgz", ".rar"): "unpack it",
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
    """Return how a file is read: ".jsonl" or ".txt".

    Raises:
        DataError: the file's name says that it is no plain text, which it would be trained on as.
    """
    ending = file.suffix.lower()
    for endings, fix in OTHER_FORMATS.items():
        if ending in endings:
            raise DataError(
                f"{file} is not plain text",
                got=f"a {ending} file",
                expected='text files, or .jsonl files with a "text" field',
                cause="its format would be trained on as if it were text",
                fix=fix,
            )
    return ".jsonl" if ending in LINES else ".txt"


def _read_files(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        if kind(file) == ".jsonl":
            yield from read_jsonl(file)
        else:
            try:
                yield file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} is not UTF-8 text", got=str(error), fix="convert or leave out the file"
                ) from None


def read_jsonl(file: Path) -> Iterator[str]:
    """The "text" field of each line; blank lines are passed over.

    Raises:
        DataError: a line is not a JSON object with a string "text"; names the file and the line number.
    """
    for number, line in lines_of(file):
        try:
            text = parse_line(line)["text"]
            if not isinstance(text, str):
                raise TypeError(f'"text" is {type(text).__name__}')
        except (ValueError, KeyError, TypeError) as error:
            cause = 'the object has no "text" field' if isinstance(error, KeyError) else str(error)
            expected = 'one object with a string field, {"text": "..."}'
            raise broken_line(file, number, line, expected=expected, cause=cause) from None
        yield text


def _read_dataset(directory: Path) -> Iterator[str]:
    table = dataset_table(directory)
    if "text" not in table.column_names:
        raise DataError(
            f"{directory} has no column 'text'", got=", ".join(table.column_names), expected="text"
        )
    for number, row in enumerate(table):
        if not isinstance(row["text"], str):
            raise DataError(
                f"{directory} has a row without text",
                got=f"row {number}: {type(row['text']).__name__}",
                expected="a column 'text' of strings",
            )
        yield row["text"]


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        file for file in root.rglob("*.py") if not SKIPPED_DIRECTORIES & set(file.relative_to(root).parts)
    )


def _read_stdlib() -> Iterator[str]:
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
        yield readers[name]()


def _spread(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
