"""The commit protocol on one file system: temporary directory, digests, fsync, rename. No tensors, no ranks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cai_mesh.errors import CheckpointError

MANIFEST = "manifest.json"
VALUES = "values.json"
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint consists of: file name to (bytes, sha256)."""

    step: int
    files: Mapping[str, tuple[int, str]]

    def dump(self) -> str:
        """JSON with a digest over its own contents."""
        body = {"format": 1, "step": self.step, "files": {n: list(v) for n, v in sorted(self.files.items())}}
        return json.dumps({**body, "sha256": _digest_of(body)}, indent=1) + "\n"

    @staticmethod
    def read(directory: Path) -> Manifest:
        """The manifest of a checkpoint directory. Raises `CheckpointError` when it is missing or damaged."""
        path = directory / MANIFEST
        try:
            body = json.loads(path.read_text())
            digest = body.pop("sha256")
            manifest = Manifest(
                int(body["step"]), {n: (int(size), str(sha)) for n, (size, sha) in body["files"].items()}
            )
        except FileNotFoundError:
            raise CheckpointError(
                f"{directory} is not a complete checkpoint",
                got="no manifest.json",
                cause="the save was interrupted, or this is another kind of directory",
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{path} is damaged", cause="its JSON does not parse") from None
        if digest != _digest_of(body):
            raise CheckpointError(f"{path} is damaged", cause="its digest does not match its contents")
        return manifest


def _digest_of(body: Mapping) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def digest(path: Path) -> tuple[int, str]:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Force a file's or directory's contents to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def name_of(step: int) -> str:
    """Directory name of a step."""
    return f"step-{step}"


def begin(directory: Path, step: int) -> Path:
    """Make the temporary directory of a step. Raises `CheckpointError` when a good checkpoint of it exists.

    A damaged one of the same step is moved aside, not deleted.
    """
    final = directory / name_of(step)
    if final.exists():
        if not problems(final):
            raise CheckpointError(
                f"checkpoint {final} exists", fix="resume from it, or train into another directory"
            )
        aside = next(
            p for i in range(1 << 16) if not (p := final.with_name(f"{final.name}.damaged-{i}")).exists()
        )
        final.rename(aside)
    temporary = directory / f"{name_of(step)}.tmp"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, step: int, files: Mapping[str, tuple[int, str]], keep_last: int | None) -> Path:
    """Write the manifest, force everything to disk and rename; then drop the oldest beyond `keep_last`."""
    manifest = temporary / MANIFEST
    manifest.write_text(Manifest(step, files).dump())
    fsync(manifest)
    fsync(temporary)
    final = temporary.with_name(name_of(step))
    temporary.rename(final)
    fsync(final.parent)
    if keep_last is not None:
        for old in steps(final.parent)[:-keep_last]:
            doomed = old.with_name(f"{old.name}.deleting")
            old.rename(doomed)
            shutil.rmtree(doomed)
    return final


def steps(directory: str | os.PathLike) -> list[Path]:
    """Committed checkpoints below a directory, oldest step first, damaged ones included."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [
        (int(m[1]), path)
        for path in directory.iterdir()
        if (m := _STEP.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found)]


def latest(directory: str | os.PathLike) -> Path | None:
    """The newest committed checkpoint below a directory, not verified; None when there is none."""
    found = steps(directory)
    return found[-1] if found else None


def problems(checkpoint: Path, *, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with a checkpoint, a line each; empty when every file has its size and digest.

    With `parts`, only every `parts`-th file from `part` on is read, so that ranks can share the work.
    """
    try:
        manifest = Manifest.read(checkpoint)
    except CheckpointError as error:
        return [error.what]
    found = []
    for name, (size, sha) in sorted(manifest.files.items())[part::parts]:
        path = checkpoint / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.stat().st_size != size:
            found.append(f"{path} is truncated or grown: {path.stat().st_size} bytes, expected {size}")
        elif digest(path)[1] != sha:
            found.append(f"{path} is corrupt: its sha256 is not the one recorded when it was written")
    return found


def verify(checkpoint: str | os.PathLike) -> Manifest:
    """Check every file of a checkpoint directory; returns its manifest.

    Raises `CheckpointError` that names each missing, truncated or corrupt file.
    """
    checkpoint = Path(checkpoint)
    if not checkpoint.is_dir():
        raise CheckpointError(f"there is no checkpoint {checkpoint}")
    raise_for(problems(checkpoint), checkpoint)
    return Manifest.read(checkpoint)


def raise_for(found: list[str], checkpoint: Path) -> None:
    """Raise the `CheckpointError` of a list of problems, if there are any."""
    if found:
        raise CheckpointError(
            f"checkpoint {checkpoint} is damaged",
            got="\n             ".join(found),
            fix="load an older one, or restore the files from a copy",
        )
