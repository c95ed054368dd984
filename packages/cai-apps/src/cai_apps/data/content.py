"""Digests of what files hold, which are read again only where they may have changed.

    <cache>/digests/<name>.json     of each file: device, inode, size, times of change, and SHA-256 (of weights, of each
                                    tensor)

A program can set a file's time of modification, but not the time of its last change (`st_ctime`). A file whose
numbers are those of before is not read again, unless it was changed within `SETTLING` of being read: a clock's tick
may then hide a second change.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cai_mesh.errors import CheckpointError, ConfigError, DataError
from cai_mesh.files import check_header, own_folder, private_folder, weight_files, write_text

SETTLING = 2 * 10**9
"""Nanoseconds after a file's last change in which it may change again unseen; clocks of file systems are coarse."""
PART = 2**20
THREADS = 8
"""Threads that read a file of weights; a digest lets others run."""
DIGESTS = "digests"


def digest_of_files(files: Mapping[str, Path], cache: str) -> str:
    """Return a digest of names and bytes; where the files lie and when they were written does not count.

    Args:
        files: the files by the names that count, in any order.
        cache: the directory `data.cache`, where digests of files are kept.

    Raises:
        ConfigError: the cache is another user's, or others may write there.
        DataError: a file cannot be read.
    """
    total = hashlib.sha256()
    for name, digest in _contents(files, cache, "", _bytes_digest).items():
        total.update(f"{name}\0{digest}\n".encode(errors="surrogateescape"))
    return total.hexdigest()


def digest_of_weights(directories: Mapping[str, Path], cache: str) -> str:
    """Return a digest of the tensors that `from_pretrained` reads: names, dtypes, shapes and values.

    Into which files they are cut, and what else stands there, does not count.

    Args:
        directories: directories of weights by the names that count, in any order.
        cache: as for `digest_of_files`.

    Raises:
        ConfigError: as for `digest_of_files`, or a directory has no weights, or several variants and none plain.
        CheckpointError: a file of weights is not sound.
        DataError: a file cannot be read.
    """
    places = {
        part: (path, weight_files(path, error=ConfigError).tensors) for part, path in directories.items()
    }
    files = {
        f"{part}/{file}": path / file
        for part, (path, where) in places.items()
        for file in set(where.values())
    }
    texts = _contents(files, cache, "weights", _tensor_digests)
    digests = {name: json.loads(text) for name, text in texts.items()}
    total = hashlib.sha256()
    for part, (path, where) in sorted(places.items()):
        for tensor, file in sorted(where.items()):
            of_file = digests[f"{part}/{file}"]
            if tensor not in of_file:
                raise CheckpointError(
                    f"{path / file} has no tensor {tensor}",
                    cause="the index beside it says that it has",
                    fix="copy or download the folder again",
                )
            total.update(f"{part}\0{tensor}\0{of_file[tensor]}\n".encode())
    return total.hexdigest()


def _contents(
    files: Mapping[str, Path], cache: str, kind: str, digest: Callable[[Path], str]
) -> dict[str, str]:
    """Return what `digest` says of each file, by names in order; files that are known are not read again."""
    paths = "\0".join([kind, *sorted(str(path.absolute()) for path in files.values())])
    home = private_folder(Path(cache), "data.cache")
    record = (
        own_folder(home / DIGESTS, below=home)
        / f"{hashlib.sha256(paths.encode(errors='surrogateescape')).hexdigest()[:20]}.json"
    )
    before, after = _read(record), {}
    contents: dict[str, str] = {}
    for name, path in sorted(files.items()):
        contents[name], entry = _digest(path, before.get(str(path.absolute())), digest)
        if entry is not None:
            after[str(path.absolute())] = entry
    if after != before:
        write_text(record, json.dumps(after))
    return contents


def _read(record: Path) -> dict[str, list[int | str]]:
    """Return what a record says of each file; nothing where it is not there or damaged."""
    try:
        entries = json.loads(record.read_text(encoding="utf-8"))
        return {str(path): [*map(int, entry[:-1]), str(entry[-1])] for path, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, IndexError):
        return {}


def _digest(
    path: Path, entry: list[int | str] | None, digest: Callable[[Path], str]
) -> tuple[str, list[int | str] | None]:
    """Return what `digest` says of a file, and the entry by which it is known again; None: it may be changing."""
    try:
        start, stamp = time.time_ns(), _stamp(path)
        if entry is not None and entry[:-1] == stamp:
            return str(entry[-1]), entry
        content = digest(path)
        settled = stamp == _stamp(path) and start - path.stat().st_ctime_ns > SETTLING
    except OSError as error:
        raise DataError(f"{path} cannot be read", cause=error.strerror or str(error)) from None
    return content, [*stamp, content] if settled else None


def _bytes_digest(path: Path) -> str:
    content = hashlib.sha256()
    with path.open("rb") as opened:
        while part := opened.read(PART):
            content.update(part)
    return content.hexdigest()


def _tensor_digests(path: Path) -> str:
    """Return digests of a file's tensors by name, as JSON; several threads read."""
    table = check_header(path)
    with path.open("rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:

        def digest(entry: Mapping[str, Any]) -> str:
            first, end = (begin + offset for offset in entry["data_offsets"])
            content = hashlib.sha256(f"{entry['dtype']} {entry['shape']}".encode())
            for place in range(first, end, PART):
                content.update(mapped[place : min(place + PART, end)])
            return content.hexdigest()

        with ThreadPoolExecutor(THREADS) as pool:
            return json.dumps(dict(zip(table, pool.map(digest, table.values()), strict=True)))


def _stamp(path: Path) -> list[int | str]:
    status = path.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
