"""The parts of a checkpoint and how each is known: by size, digest, and the id of the save that wrote it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cai_mesh.errors import CheckpointError
from cai_mesh.files.paths import inside

MANIFEST = "manifest.json"
METADATA = ".metadata"
VALUES = "values.json"
FORMAT = 2
STEP = re.compile(r"step-(\d+)")
UNDONE = (".tmp", ".deleting")
"""The endings of directories whose save or deletion was not finished."""
_SEAL = re.compile(rb'\{?"save": "([0-9a-f]{32})"\}\n\Z')
_SEAL_BYTES = 64


@dataclass(frozen=True)
class Manifest:
    """The parts of a committed checkpoint.

    Args:
        step: the step it is of.
        save: id of the save that wrote all of it: 32 hexadecimal digits.
        job: the job that saved it, for people.
        files: (bytes, sha256) by file name.
    """

    step: int
    save: str
    job: str
    files: Mapping[str, tuple[int, str]]

    def dump(self) -> str:
        """JSON with a digest over its own contents."""
        files = {name: list(entry) for name, entry in sorted(self.files.items())}
        body = {"format": FORMAT, "step": self.step, "save": self.save, "job": self.job, "files": files}
        return json.dumps({**body, "sha256": _digest_of(body)}, indent=1) + "\n"

    @staticmethod
    def read(directory: Path) -> Manifest:
        """The manifest of a checkpoint directory.

        Raises `CheckpointError` when it is missing, damaged, of another format, or of another step than the
        directory's name says.
        """
        path = directory / MANIFEST
        body = _body(path)
        if body.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is of format {body.get('format')}, which this version does not read",
                expected=f"format {FORMAT}",
                fix="load it with the version of cai-mesh that saved it, and export the weights from there",
            )
        try:
            step, save, job = body["step"], body["save"], body["job"]
            files = {name: (int(size), str(sha)) for name, (size, sha) in body["files"].items()}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} lacks what a manifest says",
                cause=f"{type(error).__name__}: {error}",
                expected="step, save, job, and for each file its bytes and digest",
                fix="take another checkpoint",
            ) from None
        if not files:
            raise CheckpointError(f"{path} names no file", expected="those of a checkpoint")
        named = STEP.fullmatch(directory.name)
        if named and int(named[1]) != step:
            raise CheckpointError(
                f"{path} is of step {step}, not of the step its directory is named for",
                expected=named[1],
                fix="give the directory its own name again",
            )
        for name in files:
            if inside(directory, name, said_by=path).parent != directory:
                raise CheckpointError(f"{path} names a file in another directory: {name!r}")
        return Manifest(step, save, job, files)

    def bytes_of(self, directory: Path, name: str) -> bytes:
        """Return the contents of a file, as it was written. Raises `CheckpointError` that names it when it is not."""
        path = directory / name
        _refuse_pipes(path)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        if (save := _sealed(raw)) not in (None, self.save):
            raise CheckpointError(self._of_another(path, save))
        if self.files.get(name) != (len(raw), hashlib.sha256(raw).hexdigest()):
            raise CheckpointError(f"{path} is corrupt: it is not what manifest.json has recorded of it")
        return raw

    def problem(self, path: Path, *, digests: bool) -> str | None:
        """Return what is wrong with one of the files; None when nothing is. `digests` as for `problems`."""
        size, sha = self.files[path.name]
        if path.exists() and not path.is_file():
            return f"{path} is no regular file"
        try:
            actual_size, save = path.stat().st_size, save_of(path)
            if save not in (None, self.save):
                return self._of_another(path, save)
            if actual_size != size:
                return f"{path} is truncated or grown: {actual_size} bytes, expected {size}"
            if save is None or (digests and digest(path)[1] != sha):
                return f"{path} is corrupt: its sha256 is not the one recorded when it was written"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error}"
        return None

    def _of_another(self, path: Path, save: str | None) -> str:
        return f"{path} is of another save: it carries the id {save}, manifest.json {self.save}"


def _body(path: Path) -> dict:
    """The contents of a manifest whose own digest is right."""
    _refuse_pipes(path)
    try:
        raw = path.read_bytes()
        body = json.loads(raw)
        digest = body.pop("sha256")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} is not a complete checkpoint",
            got="no manifest.json",
            cause="the save was interrupted, or this is another kind of directory",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is damaged", cause="its JSON does not parse") from None
    if digest != _digest_of(body) or not raw.endswith(b"\n"):
        raise CheckpointError(f"{path} is damaged", cause="its digest does not match its contents")
    return body


def _refuse_pipes(path: Path) -> None:
    """Raise CheckpointError for what would be read for ever."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is damaged", cause="it is no regular file")


def _digest_of(body: Mapping) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def digest(path: Path) -> tuple[int, str]:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Force a file's or directory's contents to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(path: Path, save: str) -> tuple[int, str]:
    """End a file with the id of its save and force it to disk; returns its size and sha256.

    Readers of pickles and of DCP's files never look behind the last item, so the file stays what it was to them.
    """
    with path.open("ab") as file:
        file.write(json.dumps({"save": save}).encode() + b"\n")
    fsync(path)
    return digest(path)


def write_values(path: Path, values: Mapping, save: str) -> tuple[int, str]:
    """Write plain values as JSON that ends with the id of its save; returns the file's size and sha256."""
    path.write_text(json.dumps({"values": values, "save": save}) + "\n")
    fsync(path)
    return digest(path)


def save_of(path: Path) -> str | None:
    """Id of the save that wrote a file; None when the file does not end with one."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _SEAL_BYTES))
        return _sealed(file.read())


def _sealed(raw: bytes) -> str | None:
    match = _SEAL.search(raw[-_SEAL_BYTES:])
    return match[1].decode() if match else None


def problems(checkpoint: Path, *, part: int = 0, parts: int = 1, digests: bool = True) -> list[str]:
    """Return what is wrong with a checkpoint, a line each; empty when every file is as the manifest says.

    With `parts`, only every `parts`-th file from `part` on is read, so that ranks can share the work. Without
    `digests` files are not read: they must be there, have their size and be of the manifest's save.
    """
    try:
        manifest = Manifest.read(checkpoint)
    except (CheckpointError, OSError) as error:
        return [error.what if isinstance(error, CheckpointError) else f"{checkpoint}: {error}"]
    paths = [checkpoint / name for name in sorted(manifest.files)[part::parts]]
    return [line for path in paths if (line := manifest.problem(path, digests=digests))]


def verify(checkpoint: str | os.PathLike) -> Manifest:
    """Check every file of a checkpoint directory; returns its manifest.

    Raises `CheckpointError` that names each missing, truncated or corrupt file, and each that another save wrote.
    """
    checkpoint = Path(checkpoint)
    raise_unless_done(checkpoint)
    manifest = Manifest.read(checkpoint)
    raise_for(problems(checkpoint), checkpoint)
    return manifest


def raise_unless_done(checkpoint: Path) -> None:
    """Raise `CheckpointError` when there is no such directory, or its save or deletion was not finished."""
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"there is no checkpoint {checkpoint}", expected="a directory step-N with a manifest.json"
        )
    if checkpoint.name.endswith(UNDONE):
        raise CheckpointError(
            f"{checkpoint} is no checkpoint",
            cause="its save or its deletion was not finished; the next save into its directory removes it",
            fix="take one whose name is step-N",
        )


def raise_for(lines: list[str], checkpoint: Path) -> None:
    """Raise the `CheckpointError` of a list of problems, if there are any."""
    if lines:
        raise CheckpointError(
            f"checkpoint {checkpoint} is damaged",
            got="\n             ".join(lines),
            fix="load an older one, or restore the files from a copy",
        )
