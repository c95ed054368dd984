"""Every code block of every README runs as it stands.

Python and shell blocks run by their language. A comment on the line above a block can say more:
`<!-- run: ranks=2 -->` starts a Python block on that many ranks, and `<!-- run: no, because ... -->` is for
the two commands that would start this very suite.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"(?:<!-- run: (?P<how>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
SHELL = ("bash", "sh", "shell", "console")
OWN_COMMANDS = {"pip install nox && nox -s train", "pip install nox && nox -s tests"}


class Block(NamedTuple):
    path: Path
    line: int
    language: str
    how: str
    code: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for path in [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]:
        text = path.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            found.append(Block(path, line, match["language"], match["how"] or "", match["code"]))
    return found


def commands(block: Block) -> list[str]:
    """The shell lines of a block without comments."""
    lines = (line.split("  #")[0].strip() for line in block.code.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def run(command: list[str], folder: Path) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_blocks_are_found():
    assert len(blocks()) >= 2


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_block_runs(block: Block, tmp_path: Path):
    if block.how.startswith("no, because"):
        assert set(commands(block)) <= OWN_COMMANDS, "only the two commands of the house may stay unrun"
    elif block.language == "python":
        script = tmp_path / "block.py"
        script.write_text(block.code)
        ranks = re.fullmatch(r"ranks=(\d+)", block.how)
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks[1]}"] if ranks else []
        )
        run([sys.executable, *launcher, str(script)], tmp_path)
    elif block.language in SHELL:
        run(["bash", "-euo", "pipefail", "-c", "\n".join(commands(block))], tmp_path)
    else:
        assert block.language in ("text", "toml"), f"{block}: say what language this block is in"
