"""A bad input given to `cai`, in this process."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from bad_inputs import Case

from cai_apps.cli import main


@dataclass(frozen=True)
class Outcome:
    """Exit code, what was printed, and names of files that came, went or changed."""

    code: int
    out: str
    err: str
    touched: set[str]


def run(case: Case, here: Path) -> Outcome:
    """What `cai` says to a case in the empty directory `here`."""
    if case.files is not None:
        case.files(here)
    before = _digests(here)
    out, err = io.StringIO(), io.StringIO()
    arguments = [argument.replace("{here}", str(here)) for argument in case.arguments]
    cleared = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    with (
        contextlib.chdir(here),
        mock.patch.dict(os.environ, cleared | case.environment, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main(arguments)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
    after = _digests(here)
    touched = {name for name in {**before, **after} if before.get(name) != after.get(name)}
    return Outcome(code, out.getvalue(), err.getvalue(), {t for t in touched if not t.startswith("cache")})


LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CAI_HANG_SECONDS",
)


def _digests(here: Path) -> dict[str, str]:
    """Digest by name of what is in a directory."""
    found = {}
    for path in here.rglob("*"):
        held = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(here))] = hashlib.sha256(path.read_bytes()).hexdigest() if held else ""
    return found
