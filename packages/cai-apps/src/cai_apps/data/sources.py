"""Text documents from the standard library, text files, JSONL files and HF dataset directories.

A source is an iterator of strings in an order that depends only on the source, so every machine with the same
files reads the same documents.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cai_apps.config.places import check_regular
from cai_apps.data.content import digest_of_files
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
        DataError: nothing is there, or a file cannot be read.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return digest_of_files({f"stdlib/{file.relative_to(root)}": file for file in _stdlib_files()}, cache)
    files = _files_of(source)
    if is_dataset_directory(source):
        root = Path(source).expanduser()
        return digest_of_files({f"dataset/{file.relative_to(root)}": file for file in files}, cache)
    return digest_of_files({f"{number:09d}{kind(file)}": file for number, file in enumerate(files)}, cache)


def _read(source: str) -> Iterator[str]:
    if source == STDLIB:
        return _read_stdlib()
    if is_dataset_directory(source):
        return _read_dataset(Path(source).expanduser())
    return _read_files(_files_of(source))


def is_dataset_directory(source: str) -> bool:
    """Whether the path was written by `datasets.save_to_disk`."""
    directory = Path(source).expanduser()
    return (directory / "dataset_info.json").is_file() or (directory / "dataset_dict.json").is_file()


def _files_of(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if is_dataset_directory(source):
        return sorted(file for file in path.rglob("*") if file.is_file())
    if path.is_dir():
        raise DataError(
            f"data.source is a directory that is not an HF dataset: {source}",
            expected="a directory written by datasets.save_to_disk, a file, or a glob",
            fix=f"for its text files use the glob '{source.rstrip('/')}/**/*.txt'",
        )
    check_regular(path)
    matches = [path] if path.is_file() else [Path(name) for name in glob.glob(str(path), recursive=True)]
    files = sorted(file for file in matches if file.is_file())
    if not files:
        raise DataError(
            f"data.source matches no file: {source}",
            expected=f"{STDLIB!r}, a text or .jsonl file, a glob, or an HF dataset directory",
            fix="check the path; relative paths start at the current directory",
        )
    return files


LINES = (".jsonl", ".ndjson")
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
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError(f'"text" is {type(text).__name__}')
                text.encode()  # half of a surrogate pair, as JSON can say it, is no text
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                cause = 'the object has no "text" field' if isinstance(error, KeyError) else str(error)
                raise DataError(
                    f"broken JSONL line at {file}:{number}",
                    got=line.strip()[:80].decode(errors="replace"),
                    expected='one object with a string field, {"text": "..."}',
                    cause=cause,
                    fix=f"correct or delete line {number}",
                ) from None
            yield text


def _read_dataset(directory: Path) -> Iterator[str]:
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
        split = "train" if "train" in table else sorted(table)[0]
        table = table[split]
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
