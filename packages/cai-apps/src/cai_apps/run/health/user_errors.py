"""Errors of Python and other libraries, turned into errors of the user where they are such: the last line of defence.

Rooms say what is wrong where they know it. What passes them, as a disk that is full or a file that was cut off in the
middle of a read, comes here.
"""

from __future__ import annotations

import errno
import json
import pickle
import sys
import tomllib
import traceback
import zipfile
from pathlib import Path

from cai_apps.config.panics import is_panic
from cai_apps.config.terminal import printable
from cai_mesh.errors import CaiError

FIXES = {
    errno.ENOENT: "check the name",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.EISDIR: "give a file",
    errno.ENOTDIR: "give a directory, below directories",
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of your quota, or choose another disk",
    errno.EROFS: "choose a place that can be written to",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EADDRINUSE: "choose another port, or end the program that has it",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
"""What to do, by the number of an error of the operating system."""
DATA = (
    UnicodeError,
    json.JSONDecodeError,
    tomllib.TOMLDecodeError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
"""What reading something raises that is not what its name says."""
FOREIGN = {
    "safetensors": "the file of weights is damaged or none: copy or download it again",
    "safetensors_rust": "the file of weights is damaged or none: copy or download it again",
    "tokenizers": "the tokenizer's files are damaged or of another kind: copy or download them again",
    "transformers": "check the directory or hub id: it must hold a model of transformers, with its tokenizer",
    "diffusers": "check the directory or hub id: it must hold a pipeline of diffusers",
    "huggingface_hub": "check the name and the connection, or give a directory",
    "httpx": "check the connection, or give a directory",
    "httpcore": "check the connection, or give a directory",
    "requests": "check the connection, or give a directory",
    "datasets": "check the directory: it must be written by datasets.save_to_disk",
    "gemmi": "check the file: it must be a structure as mmCIF or PDB",
    "PIL": "check the file: it must be a picture",
}
"""What to do, by the package that raised an error or holds its class."""
REFUSALS = (ValueError, OSError, LookupError, TypeError, AttributeError, AssertionError)
"""What code raises over values that it does not take."""
TRAINING = "ERRORS_ARE_FAULTS"
"""Name that is true among the globals of a module which trains: the code of a model that it calls gets no input."""
LOST = ("by peer", "Broken pipe", "Connection refused", "remote process exited", "ncclRemoteError")
"""What gloo and NCCL say where the other end of a connection has gone."""


def user_error(error: BaseException) -> CaiError | None:
    """The error of the user that an exception is; None where it is a fault of cai or of a model's code."""
    if isinstance(error, CaiError):
        return error
    if type(error).__name__ == "OutOfMemoryError":
        return CaiError(
            "the device has too little memory",
            cause=_line(error),
            fix="`cai plan` says what a run needs: lower train.microbatch_size, set memory.recompute, or shard over "
            "more ranks with parallel.zero = 3",
        )
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    ):
        return CaiError(
            "this machine has too little memory", cause=_line(error), fix="give it less, or more memory"
        )
    if isinstance(error, DATA):
        return CaiError(
            "an input is not what its name says",
            got=_line(error),
            expected="UTF-8 text, or the format of its name",
            cause=f"met in {_place(error)}",
            fix="copy or download the file again",
        )
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of Path.expanduser
        return CaiError(
            "a path that begins with ~ has no home directory",
            cause="~NAME is the home of the user NAME, whom this machine does not know",
            fix="write the path in full",
        )
    package = _package(error)
    if package is not None:
        return CaiError(f"{package} refuses an input", got=_line(error), fix=FOREIGN[package])
    if isinstance(error, OSError) and error.errno is not None:
        named = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return CaiError(
            f"{named}: {error.strerror}" if named else str(error.strerror),
            fix=FIXES.get(error.errno, "check the file or directory"),
        )
    if isinstance(error, ModuleNotFoundError):
        return CaiError(f"the package {error.name} is not installed", fix=f"pip install {error.name}")
    return None


def show(error: BaseException, *, machine: bool = False) -> None:
    """Prints an error to stderr: as a message, or as JSON where a machine reads."""
    cai_error = user_error(error)
    if machine:
        fields = ("what", "got", "expected", "cause", "fix")
        table = (
            {name: str(getattr(cai_error, name) or "") for name in fields}
            if cai_error
            else {"what": _line(error)}
        )
        print(json.dumps({"error": table}), file=sys.stderr)
        return
    text = str(cai_error) if cai_error is not None else str(_unknown(error))
    print(f"error: {printable(text)}", file=sys.stderr)


def _unknown(error: BaseException) -> CaiError:
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST):
        return CaiError(
            "this rank has lost another one",
            got=_line(error),
            cause="that rank ended first, or the network between them",
            fix="see the error of that rank",
        )
    return CaiError(
        "this should not have happened",
        got=f"{type(error).__name__}: {_line(error)}, in {_place(error)}",
        cause="a fault of cai, or of the code of a model or a library",
        fix=f"report the traceback: {' '.join(getattr(error, '__notes__', [])) or 'run it again with --debug'}",
    )


def _line(error: BaseException) -> str:
    """The first line of what an error says, or its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _place(error: BaseException) -> str:
    """File and line, of cai where it was there."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if "cai_" in frame.filename] or frames
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"


def _package(error: BaseException) -> str | None:
    """The package of `FOREIGN` that holds an error's class, or whose code refused a value outside of training.

    What the code of a model raises while it is trained is no input of the user.
    """
    home = type(error).__module__.partition(".")[0]
    if home in FOREIGN:
        return home
    spaces = [frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__)]
    refuses = isinstance(error, REFUSALS) or type(error) is Exception or is_panic(error)
    if not refuses or any(space.get(TRAINING) for space in spaces):
        return None
    names = [space.get("__name__", "") for space in spaces]
    last_cai_frame = max((i for i, name in enumerate(names) if name.startswith("cai_")), default=-1)
    below = (name.partition(".")[0] for name in names[last_cai_frame + 1 :])
    return next((name for name in below if name in FOREIGN), None)
