"""Pretrained weights of a model: files of a directory or the hub, or those of a base that is trained here first.

A base is a small model for recipes that fine-tune. Its training is a run of its own, in another process on the CPU,
whose export is kept in `data.cache` under a digest of what it depends on: its config, its shape and the text. So it is
trained once, and the same for every run that begins with it.

    <cache>/<key>/    the export: config.json, model.safetensors, the tokenizer with a chat template
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cai_apps.applications.language.config import Config
from cai_apps.compose.models import base_training, pretrained_directory, read_model_config
from cai_apps.config import file as config_file
from cai_apps.config.environment import LAUNCHER, LAUNCHER_VARIABLES
from cai_apps.data import sources
from cai_apps.data.chat.tokenizer import train_text_tokenizer
from cai_apps.data.prepare import texts_of
from cai_apps.data.sealed import key_of, open_or_make
from cai_mesh.errors import ConfigError

FORMAT = 1
OF_A_RANK = (*LAUNCHER_VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID", "TORCHELASTIC_RUN_ID")
"""Variables of the environment that make a process a rank, which the training of a base is not."""


def is_base(config: Config) -> bool:
    """Return whether a config's pretrained weights are those of a base that is trained here."""
    return config.model.weights == "pretrained" and base_training(config.model.name) is not None


def weights_directory(config: Config) -> Path:
    """Return the directory of a config's pretrained weights; a base is trained where the cache does not have it.

    Raises:
        CheckpointError: the files of the weights are not sound.
        ConfigError: there are none under this name, or the training of the base failed.
    """
    training = base_training(config.model.name)
    if training is None:
        return pretrained_directory(config.model.name)
    options, cache = config_file.read(training, Config), config.data.cache
    shape, text = read_model_config(config.model.name), sources.content(*options.data.sources, cache=cache)
    key = key_of("base", FORMAT, config_file.to_toml(options), shape, text)

    def train(directory: Path) -> None:
        print(
            f"{config.model.name} is trained first, in {options.train.steps} steps on text ({options.data.source}), "
            f"and kept in {Path(cache).expanduser() / key}",
            flush=True,
        )
        texts = texts_of(options.data)
        tokenizer, run = directory / "tokenizer", directory / "run"
        train_text_tokenizer(texts, shape["vocab_size"]).save_pretrained(tokenizer)
        _train(config.model.name, training, tokenizer, run, cache)
        for file in (run / "export").iterdir():
            file.rename(directory / file.name)
        shutil.rmtree(tokenizer)
        shutil.rmtree(run)

    return open_or_make(cache, key, train)


def base_name(config: Config) -> str:
    """Return the name by which other programs find the model of a config's pretrained weights: a path, or a hub id."""
    directory = weights_directory(config) if is_base(config) else Path(config.model.name).expanduser()
    return str(directory.absolute()) if directory.is_dir() else config.model.name


def _train(name: str, training: Path, tokenizer: Path, run: Path, cache: str) -> None:
    """Run the training of a base in a process of its own, which ends with this one; its steps are shown."""
    changes = {"data.tokenizer": tokenizer, "data.cache": cache, "log.directory": run}
    flags = [text for key, value in changes.items() for text in (f"--{key}", str(value))]
    environment = {key: value for key, value in os.environ.items() if key not in OF_A_RANK}
    environment[LAUNCHER] = str(os.getpid())
    command = [sys.executable, "-m", "cai_apps", "train", str(training), *flags]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                print(f"  {name}: {line}", end="", flush=True)
    if process.returncode:
        raise ConfigError(
            f"the base {name} could not be trained",
            got=f"exit code {process.returncode} of its training, whose error stands above",
            fix="set model.name to a directory or a hub id, of a model that has weights",
        )
