"""Published weights, once in a form that ranks of any layout read: a file of safetensors by OpenFold's names."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from cai_apps.applications.protein.config import Config
from cai_apps.applications.protein.design import sizes_for
from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_apps.applications.protein.weights import openfold_names, read_weights

FILE = "model.safetensors"


def weights_directory(config: Config) -> Path:
    """Where `prepare_weights` puts the weights that a run starts from; it depends on the file and the model."""
    file = Path(config.model.weights).expanduser()
    with file.open("rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    key = f"{content} {config.model.name} {config.data.templates > 0} {config.model.errors}"
    return Path(config.data.cache).expanduser() / "weights" / hashlib.sha256(key.encode()).hexdigest()[:20]


def prepare_weights(config: Config) -> None:
    """Write the file, unless it is there or weights are random.

    Raises `DataError` for a file that is none, or of another model.
    """
    if config.model.weights == "random" or (weights_directory(config) / FILE).is_file():
        return
    directory = weights_directory(config)
    with torch.device("meta"):
        model = AlphaFold(sizes_for(config))
    model = model.to_empty(device="cpu")
    read_weights(model, Path(config.model.weights).expanduser())
    names = openfold_names(model)
    unfinished = directory.with_name(f"{directory.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    save_file({names[name]: param.detach() for name, param in model.named_parameters()}, unfinished / FILE)
    try:
        os.rename(unfinished, directory)
    except OSError:  # another job has written it meanwhile
        shutil.rmtree(unfinished)
