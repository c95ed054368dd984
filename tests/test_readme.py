"""Every code block of every README runs as it stands, and those of the two tutorials one after the other.

Python and shell blocks run by their language. A comment on the line above a block can say more:
`<!-- run: ranks=2 -->` starts a Python block on that many ranks, and `<!-- run: no, because ... -->` is for
the two commands that would start this very suite.
"""

from __future__ import annotations

import json
import os
import re
import shlex
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
TUTORIAL, PREFERENCES = ROOT / "docs" / "fine-tuning.md", ROOT / "docs" / "alignment.md"
ELSEWHERE = ["pip install 'cai-apps[lora]'", "vllm serve my-tuned-model"]
"""Commands of the tutorials that are not run: what is installed already, and another program."""
THINGS = ("parcel", "letter", "bicycle", "refund", "invoice", "key", "ticket", "coat")


class Block(NamedTuple):
    path: Path
    line: int
    language: str
    how: str
    code: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    return blocks_of([ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))])


def blocks_of(pages: list[Path]) -> list[Block]:
    found = []
    for path in pages:
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
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=560)
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


def conversations() -> list[dict]:
    """Questions and answers of a shop, 400 of them."""
    answers = ("Send me its number, please.", "I am looking for it.", "It arrives on day {}.")
    return [
        {
            "messages": [
                {"role": "user", "content": f"Where is my {THINGS[number % 8]}, of order {number}?"},
                {"role": "assistant", "content": answers[number % 3].format(number % 7)},
            ]
        }
        for number in range(400)
    ]


def prepare(folder: Path) -> None:
    """Put the model and the file into the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from cai_apps.data.chat.tokenizer import train_text_tokenizer

    rows = conversations()
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [message["content"] for row in rows[:100] for message in row["messages"]]
    tokenizer = train_text_tokenizer(texts, 320)
    config = AutoConfig.for_model(
        "llama", vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=0, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "my-model")
    tokenizer.save_pretrained(folder / "my-model")


def check_record(record: dict) -> None:
    """A record of a page is one that cai reads: a conversation or a pair."""
    from cai_apps.data.chat.messages import read_conversation  # READMEs run where cai-apps is not installed
    from cai_apps.data.preference.records import read_preference

    assert read_preference(record) if "chosen" in record else read_conversation(record).messages


def script(page: Path, folder: Path) -> str:
    """One program of all blocks of a page: shell as it stands, Python in files beside it."""
    lines = []
    for number, block in enumerate(blocks_of([page])):
        if block.how.startswith("no, because"):
            assert commands(block)[0] in ELSEWHERE
            continue
        if block.language == "json":
            check_record(json.loads(block.code))
        elif block.language == "python":
            file = folder / f"block-{number}.py"
            file.write_text(block.code)
            lines.append(f"{shlex.quote(sys.executable)} {file}")
        else:
            assert block.language in SHELL, str(block)
            lines += commands(block)
    return "\n".join(lines)


def follow(page: Path, folder: Path) -> str:
    """Run all blocks of a page in a folder, at home in it; return what they print."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    program = ["bash", "-euxo", "pipefail", "-c", script(page, folder)]
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_the_tutorial_is_followed_to_the_letter(tmp_path: Path):
    """In a folder that has what the page says one has: `my-model`, here a small one, and `chats.jsonl`."""
    pytest.importorskip("peft")
    prepare(tmp_path)
    printed = follow(TUTORIAL, tmp_path)
    for words in (
        "400 records, none broken",
        ": fits",
        "steps of 8 rows read each",
        "resumed from",
        "report.html",
    ):
        assert words in printed, printed
    run = tmp_path / "runs" / "mine"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (run / "report.html").is_file()


@pytest.mark.matrix
def test_the_tutorial_of_preferences_is_followed_to_the_letter(tmp_path: Path):
    """In an empty folder, with a model that is trained on the way; its answer turns from a curt one to a polite one."""
    pytest.importorskip("peft")
    printed = follow(PREFERENCES, tmp_path)
    for words in ("400 records, none broken", "400 pairs", "report.html", "for AutoModelForSequence"):
        assert words in printed, printed
    answers = [line for line in printed.splitlines() if line in ("Its number?", "Please send me its number.")]
    assert answers[-1] == "Please send me its number." and "Its number?" in answers
    lines = (tmp_path / "runs" / "dpo" / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    assert 0.2 <= first["rewards/accuracies"] <= 0.8  # equal rewards, or equal but for rounding
    assert last["validation_rewards/accuracies"] > 0.9 and last["rewards/margins"] > 0
    texts = (tmp_path / "runs" / "dpo" / "texts.jsonl").read_text()
    assert "Please send me its number." in texts
