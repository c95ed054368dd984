"""Digests of what files hold, which are read again only where they may have changed.

    <cache>/digests/<name>.json     of each file: device, inode, size, times of change, and SHA-256

A program can set a file's time of modification, but not the time of its last change (`st_ctime`). A file whose
numbers are those of before is not read again, unless it was changed within `SETTLING` of being read: a clock's tick
may then hide a second change.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

from cai_mesh.errors import DataError
from cai_mesh.files import own_folder, private_folder, write_text

SETTLING = 2 * 10**9
"""Nanoseconds after a file's last change in which it may change again unseen; clocks of file systems are coarse."""
PART = 2**20
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
    paths = "\0".join(sorted(str(path.absolute()) for path in files.values()))
    home = private_folder(Path(cache), "data.cache")
    record = (
        own_folder(home / DIGESTS, below=home)
        / f"{hashlib.sha256(paths.encode(errors='surrogateescape')).hexdigest()[:20]}.json"
    )
    before, after = _read(record), {}
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest, entry = _digest(path, before.get(str(path.absolute())))
        if entry is not None:
            after[str(path.absolute())] = entry
        total.update(f"{name}\0{digest}\n".encode(errors="surrogateescape"))
    if after != before:
        write_text(record, json.dumps(after))
    return total.hexdigest()


def _read(record: Path) -> dict[str, list[int | str]]:
    """Return what a record says of each file; nothing where it is not there or damaged."""
    try:
        entries = json.loads(record.read_text(encoding="utf-8"))
        return {str(path): [*map(int, entry[:-1]), str(entry[-1])] for path, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, IndexError):
        return {}


def _digest(path: Path, entry: list[int | str] | None) -> tuple[str, list[int | str] | None]:
    """Return a file's SHA-256, and the entry by which it is known again; None: it may be changing."""
    try:
        start, stamp = time.time_ns(), _stamp(path)
        if entry is not None and entry[:-1] == stamp:
            return str(entry[-1]), entry
        content = hashlib.sha256()
        with path.open("rb") as opened:
            while part := opened.read(PART):
                content.update(part)
        settled = stamp == _stamp(path) and start - path.stat().st_ctime_ns > SETTLING
    except OSError as error:
        raise DataError(f"{path} cannot be read", cause=error.strerror or str(error)) from None
    return content.hexdigest(), [*stamp, content.hexdigest()] if settled else None


def _stamp(path: Path) -> list[int | str]:
    status = path.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
