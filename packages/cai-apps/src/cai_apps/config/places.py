"""Checks of names that should be of a file or a directory of this machine."""

from __future__ import annotations

import re
from pathlib import Path

from cai_mesh.errors import CaiError, ConfigError, DataError

ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,3}[^/\\]")
"""Beginning of a URL; `Path` makes one slash of two, and file: may have three."""
HUB = re.compile(r"https?:/{1,2}(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")


def check_local(name: str, value: str) -> None:
    """Raises ConfigError for a URL in place of a path.

    Args:
        name: the key or the option whose value it is.
        value: a path, the name of something that ships, or a hub id.
    """
    if ELSEWHERE.match(value) is None:
        return
    hub = HUB.match(value)
    raise ConfigError(
        f"{name} is the address of something elsewhere",
        got=re.sub(r":/{1,2}", "://", value, count=1)[:200],
        expected="a path on this machine" + (", or a hub id" if hub else ""),
        cause="nothing is downloaded from addresses, whose contents may change",
        fix=f"use the hub id {hub[1]!r}" if hub else "download it, and give the path",
    )


def check_regular(path: Path, error: type[CaiError] = DataError) -> None:
    """Raises `error` for a pipe, a device, a socket or a directory in place of a file: a read of it might never end.

    What is not there passes: whoever reads it says so.
    """
    if path.exists() and not path.is_file():
        raise error(
            f"{path} is no regular file",
            expected="a file: no directory, no pipe and no device",
            fix="take it away, or copy what it would give into a file",
        )
