"""The files that a source names, their bytes, lines and rows, and a digest of them."""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cai_apps.config.places import check_regular
from cai_apps.data import folders
from cai_apps.data.content import digest_of_files
from cai_apps.data.endings import packing_of
from cai_mesh.errors import DataError

OPEN: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
"""What reads the bytes of a packed file."""
SHOWN = 80
"""Bytes of a broken line that are shown."""


def is_dataset_directory(source: str) -> bool:
    """Whether the path was written by `datasets.save_to_disk`."""
    directory = Path(source).expanduser()
    return (directory / "dataset_info.json").is_file() or (directory / "dataset_dict.json").is_file()


def files_of(source: str, *, expected: str, has_texts: bool) -> list[Path]:
    """Return the files of a source in the order in which they are read: by name.

    Args:
        source: a file, a glob, a folder, or a directory written by `datasets.save_to_disk`.
        expected: a list of what a source may be, for the message where nothing matches.
        has_texts: whether files of plain text are read, too.

    Raises:
        DataError: there is no such file, or a folder has files of several kinds.
    """
    path = Path(source).expanduser()
    if is_dataset_directory(source):
        return sorted(file for file in path.rglob("*") if file.is_file())
    if path.is_dir():
        return folders.training_files(path, has_texts=has_texts)
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
    return digest_of_files(
        {f"{number:09d}{kind(file)}{packing_of(file)}": file for number, file in enumerate(files)}, cache
    )


def joined(digests: Iterable[str]) -> str:
    """Return the digest of several sources; that of one alone is its own."""
    first, *more = digests
    return hashlib.sha256("\n".join((first, *more)).encode()).hexdigest() if more else first


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open the bytes of a file, unpacked where its name says so.

    Raises:
        DataError: inside, where a packed file is cut off or damaged.
    """
    packing = packing_of(file)
    if not packing:
        with file.open("rb") as stream:
            yield stream
        return
    try:
        if file.stat().st_size == 0:  # gzip takes it for a file of nothing
            raise EOFError("it has no bytes")
        with OPEN[packing](file) as stream:
            yield stream
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{file} cannot be unpacked to its end",
            cause=str(error) or type(error).__name__,
            expected=f"a whole {packing} file",
            fix="copy or download it again",
        ) from None


@contextmanager
def opened_text(file: Path, newline: str | None = None) -> Iterator[IO[str]]:
    """Open a file as UTF-8 text; a byte order mark is passed over, and errors are those of `opened`.

    Args:
        file: the file.
        newline: the treatment of line ends, as Python's `open` has it.

    Raises:
        DataError: inside, where the text is not UTF-8.
    """
    with opened(file) as stream:
        try:
            yield io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} is not UTF-8 text", got=str(error), fix="convert or leave out the file"
            ) from None


def lines_of(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and bytes of each line that is not blank; a byte order mark is passed over."""
    with opened(file) as lines:
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
