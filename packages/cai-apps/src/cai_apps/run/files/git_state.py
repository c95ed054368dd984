"""State of the git repository around the working directory: what code a run was started from."""

from __future__ import annotations

import hashlib
import os
import subprocess
from typing import Any

SECONDS = 10.0
"""Seconds that git may take for an answer."""
PLAIN = ("-c", "core.fsmonitor=false", "-c", "core.quotePath=true")
"""Options without which git would run programs that a repository names."""


def git_state() -> dict[str, Any]:
    """Return {"git": {...}}: the commit, whether its files are changed, a digest of how, and how many it does not know.

    It is {} outside of a repository, and where that has no commit or git does not answer.

    Nothing is written, and no program runs that a repository names.
    """
    commit = _git("rev-parse", "--verify", "HEAD")
    if commit is None:
        return {}
    unfiltered = _without_filters()
    status = _git(*unfiltered, "status", "--porcelain")
    difference = _git(*unfiltered, "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD")
    state: dict[str, Any] = {"commit": commit.decode().strip()}
    if status is not None and difference is not None:
        lines = status.splitlines()
        unknown = sum(line.startswith(b"??") for line in lines)
        state |= {"dirty": len(lines) > unknown, "untracked": unknown}
        state["diff"] = hashlib.sha256(difference).hexdigest() if difference else None
    return {"git": state}


def _without_filters() -> list[str]:
    """Return options by which no filter of the repository's own config runs on files that have changed."""
    pattern = r"^filter\..*\.(clean|process|required)$"
    names = _git("config", "--includes", "--name-only", "--get-regexp", pattern) or b""
    options = []
    for name in names.decode(errors="surrogateescape").splitlines():
        options += ["-c", f"{name}={'false' if name.endswith('.required') else ''}"]
    return options


def _git(*arguments: str) -> bytes | None:
    """Return what git says; None: it cannot, or takes too long."""
    command = ["git", *PLAIN, *arguments]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=SECONDS, env=environment, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
