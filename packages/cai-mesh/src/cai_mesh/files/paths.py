"""Names that files give of other files, and files that are written where others may have laid links.

A *name* that leaves its directory is refused before a byte is read. A link in a directory that is read is followed:
the hub's cache is made of them, and who lays one there can write there. Nothing is ever *written* through a link.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cai_mesh.errors import CaiError, CheckpointError, ConfigError

PRIVATE_FILE, DIRECTORY, PRIVATE_DIRECTORY = 0o600, 0o755, 0o700
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def inside(
    directory: Path, name: object, *, said_by: object = "", error: type[CaiError] = CheckpointError
) -> Path:
    """The path of a file that an index or a manifest names; the name is relative and stays below `directory`.

    Args:
        said_by: the file that has the name, for the message.
        error: the class of the error that is raised.

    Raises `error` for what is no text, empty, absolute, or has a backslash, a control character, or a part that is
    `.`, `..` or empty. Nothing is opened, and links are not looked at.
    """
    good = (
        isinstance(name, str)
        and not any(char == "\\" or ord(char) < 32 or ord(char) == 127 for char in name)
        and not any(part in ("", ".", "..") for part in name.split("/"))
    )
    if not good:
        raise error(
            f"{said_by or directory} names a file outside its directory; nothing was read",
            got=repr(name)[:200],
            expected=f"the name of a file below {directory}",
            cause="the file was damaged, or made to reach others",
            fix="do not use this directory unless you know where it comes from",
        )
    return directory / str(name)


def folder(path: Path, *, mode: int = DIRECTORY) -> Path:
    """Make a directory, and those above it, unless it is there; a link to one is refused.

    Args:
        mode: the mode of a new one; the umask may take bits away. Others may not write into it.

    Raises `ConfigError` for a link or a file of this name.
    """
    if path.is_symlink():
        raise _is_link(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=mode, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path} is not a directory", fix="move the file away") from None
    return path


def own_folder(path: Path, *, below: Path) -> Path:
    """Make a directory below another; a link or a file in its place, or on the way to it, is taken away first.

    Args:
        path: the directory; it and those on the way are below `below`, which may be a link.
    """
    on_the_way = [below / part for part in path.relative_to(below).parents if part != Path()]
    for directory in [*reversed(on_the_way), path]:
        if directory.is_symlink() or directory.is_file():
            directory.unlink()
        directory.mkdir(mode=DIRECTORY, parents=True, exist_ok=True)
    return path


def remove(path: Path) -> None:
    """Deletes a directory, as far as it goes; of a link, the link. It may be gone already."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def refuse_links(directory: Path, *, shallow: Path | None = None) -> None:
    """Raises `ConfigError` that names a symbolic link anywhere below `directory`, which may be one itself.

    Args:
        shallow: a directory below it whose own entries are looked at, and not what is in them, since it is only read.
    """
    for home, folders, files in os.walk(directory):
        for name in sorted([*folders, *files]):
            if (path := Path(home, name)).is_symlink():
                raise _is_link(path)
        if Path(home) == shallow:
            folders.clear()


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A new file for a `with` block, which takes the place of `path` at its end, or not at all.

    It is readable and writable by its owner alone, whatever the umask. A link at `path` is replaced, not followed.
    """
    unfinished = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(unfinished, flags, PRIVATE_FILE), "wb") as file:
            yield file
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file as `replaced` does, in UTF-8."""
    with replaced(path) as file:
        file.write(text.encode("utf-8", errors="surrogateescape"))


def appended(path: Path) -> IO[Any]:
    """A text file, UTF-8, that is written at its end; made for its owner alone where it is not there.

    Raises `ConfigError` where a link has its name.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, PRIVATE_FILE)
    except OSError:
        if path.is_symlink():
            raise _is_link(path) from None
        raise
    return os.fdopen(descriptor, "w", encoding="utf-8")


def private_folder(path: Path, what: str) -> Path:
    """A directory that is this user's own; made with mode 0700 where it is not there.

    Args:
        what: the use of the directory, for the message, such as "data.cache".

    Raises `ConfigError` where it, or a link to it, belongs to another user, or others may write there.
    """
    path = path.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{what} = {path} is not a directory", fix="name another") from None
    status, link = path.stat(), path.lstat()
    if {status.st_uid, link.st_uid} != {os.geteuid()}:
        raise ConfigError(
            f"{what} = {path} belongs to another user",
            got=f"owner {status.st_uid if status.st_uid != os.geteuid() else link.st_uid}",
            expected=f"owner {os.geteuid()}, who runs this",
            cause="what is kept there is trusted, and its owner can change it",
            fix=f"set {what} to a directory of your own",
        )
    if status.st_mode & OTHERS_WRITE:
        raise ConfigError(
            f"others may write into {what} = {path}",
            got=f"mode {stat.S_IMODE(status.st_mode):04o}",
            expected="mode 0700",
            cause="what is kept there is trusted, and they can change it",
            fix=f"chmod 700 {path}, and delete what is in it unless you know who wrote it",
        )
    return path


def _is_link(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is a symbolic link; nothing is written through one",
        got=f"a link to {os.readlink(path)!r}",
        expected="a file or directory of its own",
        fix="take the link away; the run directory itself may be a link",
    )
