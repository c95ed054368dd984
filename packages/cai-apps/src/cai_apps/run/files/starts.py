"""The starts of a run: when, by which command, on which machine, with which versions. A line each in starts.jsonl."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.git_state import git_state
from cai_mesh.files import appended

FILE = "starts.jsonl"
PACKAGES = ("cai-apps", "torch", "transformers", "triton")
"""Packages whose versions are kept; those that are not installed are left out."""


def record_start(run: RunDirectory, device: torch.device, *, ranks: int, step: int) -> None:
    """Append a line about this start of a run.

    Args:
        run: the directory of the run.
        device: the device of this rank.
        ranks: the number of ranks.
        step: steps that were done before it.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    line = {
        "at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command(sys.argv),
        "host": platform.node(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "device": device.type,
        "gpu": gpu,
        "ranks": ranks,
        "step": step,
        "versions": {"python": platform.python_version(), **versions()},
        **git_state(),
    }
    with appended(run.path / FILE) as file:
        file.write(json.dumps(line) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of the packages that a run depends on."""
    by_name: dict[str, str] = {}
    for name in PACKAGES:
        try:
            by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return by_name


def command(arguments: list[str]) -> str:
    """Return a command line as it is typed; the path of cai's own program is left out."""
    program, *rest = arguments or [""]
    path = Path(program)
    ours = path.name == "cai" or path.parts[-2:] in (("cai_apps", "__main__.py"), ("launch", "script.py"))
    return shlex.join(["cai" if ours else program, *rest])


def read_starts(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the starts of a run, the first one first; lines that are broken are passed over."""
    try:
        lines = (run.path / FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    starts = []
    for line in lines:
        try:
            start = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(start, dict):
            starts.append(start)
    return starts
