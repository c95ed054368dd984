"""Code blocks of pages: found, and run as they stand. What tests of READMEs and of tutorials share.

Python and shell blocks run by their language. A comment on the line above a block can say more:
`<!-- run: ranks=2 -->` starts a Python block on that many ranks, `<!-- file: loop.py -->` saves a block for a later
one, and `<!-- run: no, because ... -->` is for what a suite cannot run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"(?:<!-- (?P<how>(?:run|file): [^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
SHELL = ("bash", "sh", "shell", "console")


class Block(NamedTuple):
    path: Path
    line: int
    language: str
    how: str
    code: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def unrun(self) -> bool:
        """Whether the page says that it is not run."""
        return self.how.startswith("run: no, because")


def blocks_of(paths: list[Path]) -> list[Block]:
    """The blocks of some pages, in their order."""
    blocks = []
    for path in paths:
        text = path.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            blocks.append(Block(path, line, match["language"], match["how"] or "", match["code"]))
    return blocks


def block_named(page: Path, file: str) -> Block:
    """The block of a page that is saved as a file."""
    return next(block for block in blocks_of([page]) if block.how == f"file: {file}")


def commands(block: Block) -> list[str]:
    """The shell lines of a block without comments."""
    lines = (line.split("  #")[0].strip() for line in block.code.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def check_record(record: dict) -> None:
    """A record of a page is one that cai reads: a conversation or a pair."""
    from cai_apps.data.chat.messages import read_conversation  # READMEs run where cai-apps is not installed
    from cai_apps.data.preference.records import read_preference

    assert read_preference(record) if "chosen" in record else read_conversation(record).messages


def script(page: Path, folder: Path) -> str:
    """One program of all blocks of a page: shell as it stands, Python in files beside it.

    A block that is not run must say so, and the test of its page which commands may.
    """
    lines = []
    for number, block in enumerate(blocks_of([page])):
        if block.unrun:
            continue
        if block.how.startswith("file: "):
            (folder / block.how.removeprefix("file: ")).write_text(block.code)
        elif block.language == "json":
            check_record(json.loads(block.code))
        elif block.language == "python":
            file = folder / f"block-{number}.py"
            file.write_text(block.code)
            lines.append(f"{shlex.quote(sys.executable)} {file}")
        else:
            assert block.language in SHELL, str(block)
            lines += commands(block)
    return "\n".join(lines)


def _own_torchrun(folder: Path) -> Path:
    """Return a folder with a torchrun that starts this Python; an environment that shares its torch has none."""
    file = folder / "bin" / "torchrun"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n')
    file.chmod(0o755)
    return file.parent


def follow(page: Path, folder: Path) -> str:
    """Run all blocks of a page in a folder, at home in it; return what they print."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder / "home"),
        "PATH": f"{_own_torchrun(folder)}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    program = ["bash", "-euxo", "pipefail", "-c", script(page, folder)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        running = subprocess.Popen(
            program, cwd=folder, env=environment, stdout=out, stderr=errors, start_new_session=True
        )
        try:
            code = running.wait(timeout=560)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # what the page has left in the background
        out.seek(0)
        errors.seek(0)
        printed = out.read()
        assert code == 0, f"{printed[-4000:]}\n{errors.read()[-4000:]}"
    return printed
