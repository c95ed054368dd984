"""The page "Bring your data", followed block by block in one process, on a model of a few thousand weights."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from page_blocks import ROOT, blocks_of, commands

from cai_apps.applications.language.config import Config
from cai_apps.applications.language.rules import check_texts
from cai_apps.cli import main
from cai_apps.config import file as config_file
from cai_apps.data.endings import COLUMNS, DELIMITERS, LINES, LISTED, PACKED

PAGE = ROOT / "docs" / "data.md"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, and a model that is called MODEL."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from cai_apps.data.tokenizer import train_tokenizer

    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer(["a few words to begin with"], 300, ("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = TEMPLATE
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained("MODEL")
    tokenizer.save_pretrained("MODEL")
    return tmp_path


def test_the_page_is_followed_to_the_letter(folder: Path, capsys: pytest.CaptureFixture[str]):
    count = 0
    for block in blocks_of([PAGE]):
        if block.how.startswith("file: "):
            (folder / block.how.removeprefix("file: ").strip()).write_text(block.code)
        if block.language == "toml":
            (folder / "page.toml").write_text(block.code)
            assert tomllib.loads(block.code)
            check_texts(config_file.read(folder / "page.toml", Config))
        for line in commands(block) if block.language == "sh" else ():
            count += 1
            assert main(shlex.split(line)[1:]) == 0, line
    assert count == 6
    outputs = capsys.readouterr().out
    assert "3 documents of 3 records; 0 are empty, 1 (33.3%) have the text of one before them" in outputs
    assert "2 records, none broken" in outputs
    joined = next(json.loads(line) for line in outputs.splitlines() if line.startswith('{"texts"'))
    assert (joined["texts"], joined["length"], joined["stride"]) == (1, 16, 4)


def test_every_kind_of_file_is_in_the_table():
    table = "\n".join(line for line in PAGE.read_text().splitlines() if line.startswith("|"))
    endings = {*LINES, LISTED, COLUMNS, *DELIMITERS, *PACKED}
    assert endings <= {*re.findall(r"`(\.[a-z0-9]+)`", table)}
