"""Directories of a cache: the user's own, written under another name, and read only as they were written.

    <cache>/<key>/files.json      size and digest of every other file, written last

Of the ranks that a launcher starts on a machine the first digests; the others, which wait for it, compare sizes.
A file of up to `WHOLE` bytes is digested whole when the directory is opened. Of a larger one its size is compared, and
`SAMPLES` parts spread over all of it, the first and the last among them: a bit that flips between them is not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from cai_mesh.errors import DataError
from cai_mesh.files import inside, private_folder, write_text

FILES = "files.json"
WHOLE = 8 * 2**30
SAMPLES, PART = 256, 2**20


def open_or_make(cache: str, key: str, write: Callable[[Path], None]) -> Path:
    """The directory `key` of a cache, made by `write` where it is not there; a damaged one is told of and made anew.

    Args:
        write: fills a new directory.

    Raises `ConfigError` where the cache is not this user's own, and what `write` raises.
    """
    home = private_folder(Path(cache), "data.cache")
    directory = home / key
    if directory.is_symlink() or directory.exists():
        wrong = problem(directory)
        if wrong is None:
            return directory
        print(f"the cache {directory} is damaged and is made anew: {wrong}", flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="unfinished-", dir=home))
    try:
        write(scratch)
        seal(scratch)
        _publish(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def key_of(*inputs: object) -> str:
    """Return the key of what a directory is made of: a digest of numbers, texts, and lists and objects of them."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20]


def seal(directory: Path) -> None:
    """Writes what the files of a directory are, and forces them to disk."""
    told = {}
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        told[file.relative_to(directory).as_posix()] = [file.stat().st_size, digest(file)]
    write_text(directory / FILES, json.dumps(told, indent=1))


def problem(directory: Path) -> str | None:
    """What is wrong with a sealed directory; None when every file is as it was written."""
    if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
        return "it is a link, or another user's"
    first = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
    listed = directory / FILES
    try:
        told = json.loads(listed.read_text(encoding="utf-8"))
        entries = [(str(name), int(size), str(known)) for name, (size, known) in told.items()]
    except FileNotFoundError:
        return f"{FILES} is missing"
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{FILES} cannot be read"
    for name, size, known in entries:
        try:
            file = inside(directory, name, said_by=listed, error=DataError)
            if file.is_symlink() or not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes, not {size}"
            if first and digest(file) != known:
                return f"{name} is not what was written: its digest is another"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        except DataError as error:
            return error.what
    return None


def digest(file: Path) -> str:
    """SHA-256 of a file, or of its parts where it is larger than `WHOLE`."""
    found = hashlib.sha256()
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size <= WHOLE:
            while part := opened.read(PART):
                found.update(part)
            return found.hexdigest()
        for number in range(SAMPLES):
            opened.seek((size - PART) * number // (SAMPLES - 1))
            found.update(opened.read(PART))
    return found.hexdigest()


def _publish(scratch: Path, directory: Path) -> None:
    """Move a directory to its name; one that is there is kept if it is whole, as when another process was faster."""
    if directory.is_symlink():
        directory.unlink()
    elif directory.exists() and problem(directory) is not None:
        shutil.rmtree(directory)
    try:
        scratch.rename(directory)
    except OSError:
        if not directory.exists() or problem(directory) is not None:
            raise
