"""Every code block of every README runs as it stands, in a folder of its own.

What comments above a block say is told in `page_blocks.py`. Pages of the documentation that are followed as a whole
are in `test_tutorials.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from page_blocks import ROOT, SHELL, Block, blocks_of, commands

OWN_COMMANDS = {"pip install nox && nox -s train", "pip install nox && nox -s tests"}


def blocks() -> list[Block]:
    return blocks_of([ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))])


def run(command: list[str], folder: Path) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_blocks_are_found():
    assert len(blocks()) >= 2


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_block_runs(block: Block, tmp_path: Path):
    if block.unrun:
        assert set(commands(block)) <= OWN_COMMANDS, "only the two commands of the house may stay unrun"
    elif block.language == "python":
        script = tmp_path / "block.py"
        script.write_text(block.code)
        ranks = re.fullmatch(r"run: ranks=(\d+)", block.how)
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks[1]}"] if ranks else []
        )
        run([sys.executable, *launcher, str(script)], tmp_path)
    elif block.language in SHELL:
        run(["bash", "-euo", "pipefail", "-c", "\n".join(commands(block))], tmp_path)
    else:
        assert block.language in ("text", "toml"), f"{block}: say what language this block is in"
