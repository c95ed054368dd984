"""The files that a source names, their lines and rows, and a digest of their bytes."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cai_apps.config.places import check_regular
from cai_apps.data.content import digest_of_files
from cai_mesh.errors import DataError

LINES = (".jsonl", ".ndjson")
"""Endings of files that have one JSON object a line."""
SHOWN = 80
"""Bytes of a broken line that are shown."""


def is_dataset_directory(source: str) -> bool:
    """Whether the path was written by `datasets.save_to_disk`."""
    directory = Path(source).expanduser()
    return (directory / "dataset_info.json").is_file() or (directory / "dataset_dict.json").is_file()


def files_of(source: str, *, example: str, expected: str) -> list[Path]:
    """Return the files of a source in the order in which they are read: by name.

    Args:
        source: a file, a glob, or a directory written by `datasets.save_to_disk`.
        example: a glob within a directory, shown where one that is no dataset is named.
        expected: a list of what a source may be, for the message where nothing matches.

    Raises:
        DataError: there is no such file, or a directory is none of datasets.
    """
    path = Path(source).expanduser()
    if is_dataset_directory(source):
        return sorted(file for file in path.rglob("*") if file.is_file())
    if path.is_dir():
        raise DataError(
            f"data.source is a directory that is not an HF dataset: {source}",
            expected="a directory written by datasets.save_to_disk, a file, or a glob",
            fix=f"for its files use the glob '{source.rstrip('/')}/{example}'",
        )
    check_regular(path)
    matches = [path] if path.is_file() else [Path(name) for name in glob.glob(str(path), recursive=True)]
    files = sorted(file for file in matches if file.is_file())
    if not files:
        raise DataError(
            f"data.source matches no file: {source}",
            expected=expected,
            fix="check the path; relative paths start at the current directory",
        )
    return files


def content_of(source: str, files: list[Path], kind: Callable[[Path], str], cache: str) -> str:
    """Return a digest of the bytes of a source's files, in their order; where they lie does not count.

    Args:
        source: the value that names the files.
        files: the files, as `files_of` has them.
        kind: (file) -> the way in which it is read, which counts.
        cache: the directory `data.cache`, where digests of files are kept.
    """
    if is_dataset_directory(source):
        root = Path(source).expanduser()
        return digest_of_files({f"dataset/{file.relative_to(root)}": file for file in files}, cache)
    return digest_of_files({f"{number:09d}{kind(file)}": file for number, file in enumerate(files)}, cache)


def lines_of(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and bytes of each line that is not blank; a byte order mark is passed over."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield number, text


def parse_line(line: bytes) -> Any:
    """Return the JSON value of a line.

    Raises:
        ValueError: it has none, or text that is no Unicode, such as half of a surrogate pair.
    """
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if b"\\u" in line:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def broken_line(file: Path, number: int, line: bytes, *, expected: str, cause: str) -> DataError:
    """Return the error of a line that is not as it should be."""
    return DataError(
        f"broken JSONL line at {file}:{number}",
        got=line.strip()[:SHOWN].decode(errors="replace"),
        expected=expected,
        cause=cause,
        fix=f"correct or delete line {number}",
    )


def dataset_table(directory: Path) -> Any:
    """Return the rows of a directory written by `datasets.save_to_disk`, of several splits the training split's.

    Raises:
        DataError: the package datasets is not installed, or the directory is damaged.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{directory} is an HF dataset directory and the package 'datasets' is not installed",
            fix="pip install 'cai-apps[data]'",
        ) from None
    try:
        table: Any = datasets.load_from_disk(str(directory))
    except Exception as error:  # of pyarrow, too
        raise DataError(
            f"{directory} is damaged", cause=str(error), expected="what datasets.save_to_disk wrote"
        ) from None
    if hasattr(table, "keys"):
        return table["train" if "train" in table else sorted(table)[0]]
    return table
