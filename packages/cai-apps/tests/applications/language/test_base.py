"""The base of a recipe that fine-tunes: trained once, in a process of its own, and kept by what it depends on."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cai_apps.applications.language import base
from cai_apps.applications.language.config import Config, Model
from cai_apps.cli import main
from cai_apps.compose.models import base_training, pretrained_directory
from cai_apps.data.chat.tokenizer import END
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import load_tokenizer
from cai_mesh.errors import ConfigError

NAME = "llama-tiny-base"
SHORT = {"steps = 150": "steps = 2", "limit_bytes = 2000000": "limit_bytes = 40000", "= 16": "= 4"}


@pytest.fixture
def short(tmp_path, monkeypatch):
    """The training of the base in two steps."""
    text = base_training(NAME).read_text()
    for long, brief in SHORT.items():
        assert long in text
        text = text.replace(long, brief)
    file = tmp_path / "short.toml"
    file.write_text(text)
    monkeypatch.setattr(base, "base_training", lambda name: file if name == NAME else None)
    return file


def config(tmp_path: Path) -> Config:
    return Config(model=Model(NAME, "pretrained"), data=Data(cache=str(tmp_path / "cache")))


def nothing_starts(monkeypatch):
    def start(*_, **__):
        raise AssertionError("a process is started")

    monkeypatch.setattr(subprocess, "Popen", start)


def test_a_fresh_machine_trains_the_base_and_then_the_recipe(short, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")  # a rank's, which the base's training is not
    run, cache = tmp_path / "run", tmp_path / "cache"
    arguments = [
        "train",
        "sft-tiny",
        "--train.device",
        "cpu",
        "--train.global_batch",
        "4",
        "--log.sample_tokens",
        "2",
    ]
    arguments += ["--log.directory", str(run), "--data.cache", str(cache), "--train.validate_every", "0"]
    assert main([*arguments, "--train.steps", "2"]) == 0
    printed = capfd.readouterr().out
    directory = base.weights_directory(config(tmp_path))
    assert f"{NAME} is trained first, in 2 steps on text (stdlib), and kept in {directory}" in printed
    assert f"  {NAME}: step 2/2" in printed
    assert "unfinished" not in printed
    assert sorted(path.name for path in directory.iterdir()) == [
        "chat_template.jinja", "config.json", "files.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert load_tokenizer(directory).eos_token == END

    nothing_starts(monkeypatch)
    assert main([*arguments, "--train.steps", "3"]) == 0  # goes on
    assert "trained first" not in capfd.readouterr().out
    adapters = ["--lora.rank", "8", "--log.directory", str(tmp_path / "adapters")]
    assert main([*arguments, "--train.steps", "1", *adapters]) == 0
    options = json.loads((tmp_path / "adapters" / "export" / "adapter_config.json").read_text())
    assert options["base_model_name_or_path"] == str(directory)
    assert (
        main(["generate", str(tmp_path / "adapters"), "--chat", "--prompt", "1 plus 2", "--tokens", "2"]) == 0
    )


def test_another_training_is_another_base_and_a_damaged_one_is_made_anew(short, tmp_path, monkeypatch, capfd):
    def write(name, training, tokenizer, run, cache):
        (run / "export").mkdir(parents=True)
        (run / "export" / "model.safetensors").write_text(training.read_text())

    monkeypatch.setattr(base, "_train", write)
    first = base.weights_directory(config(tmp_path))
    assert base.weights_directory(config(tmp_path)) == first
    (first / "model.safetensors").write_text("damaged")
    assert base.weights_directory(config(tmp_path)) == first
    assert "made anew" in capfd.readouterr().out
    short.write_text(short.read_text().replace("steps = 2", "steps = 3"))
    assert base.weights_directory(config(tmp_path)) != first


def test_a_training_that_fails_is_told_and_leaves_nothing(short, tmp_path, capfd):
    short.write_text(short.read_text().replace('compute = "fp32"', "") + '\n[precision]\ncompute = "fp8"\n')
    with pytest.raises(ConfigError, match="unknown value"):
        base.weights_directory(config(tmp_path))
    short.write_text(short.read_text().partition("\n[precision]")[0].replace("lr = 5e-3", "lr = -1.0"))
    with pytest.raises(ConfigError, match="could not be trained"):
        base.weights_directory(config(tmp_path))
    assert "optimizer.lr" in capfd.readouterr().err
    assert not list((tmp_path / "cache").glob("unfinished-*"))


def test_only_a_base_has_weights_of_its_own(tmp_path):
    assert base.is_base(config(tmp_path))
    assert not base.is_base(replace(config(tmp_path), model=Model(NAME)))
    assert not base.is_base(replace(config(tmp_path), model=Model("llama-tiny", "pretrained")))
    with pytest.raises(ConfigError, match=f"trained here: {NAME}"):
        pretrained_directory("llama-tiny")


def test_a_recipe_of_a_shape_asks_for_a_model(tmp_path, capsys):
    arguments = ["train", "lora-8b", "--train.device", "cpu", "--data.cache", str(tmp_path / "cache")]
    assert main([*arguments, "--log.directory", str(tmp_path / "run")]) == 2
    refused = capsys.readouterr().err
    assert "'llama-8b' is only a shape" in refused and "set model.name to" in refused
    assert not (tmp_path / "run").exists()
