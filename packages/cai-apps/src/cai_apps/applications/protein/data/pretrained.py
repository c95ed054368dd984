"""Published weights, once in a form that ranks of any layout read: a file of safetensors by OpenFold's names."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from cai_apps.applications.protein.config import Config
from cai_apps.applications.protein.design import sizes_for
from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_apps.applications.protein.weights import openfold_names, read_weights
from cai_apps.data.content import digest_of_files
from cai_apps.data.sealed import open_or_make
from cai_mesh.files import private_folder

FILE = "model.safetensors"


def weights_directory(config: Config) -> Path:
    """Where `prepare_weights` puts the weights that a run starts from; it depends on the file and the model."""
    file = Path(config.model.weights).expanduser()
    content = digest_of_files({file.suffix: file}, config.data.cache)
    key = f"{content} {config.model.name} {config.data.templates > 0} {config.model.errors}"
    return _home(config) / hashlib.sha256(key.encode()).hexdigest()[:20]


def _home(config: Config) -> Path:
    return Path(config.data.cache).expanduser() / "weights"


def prepare_weights(config: Config) -> None:
    """Write the file, unless it is there and as it was written, or weights are random.

    Raises `DataError` for a file that is none, or of another model, and `ConfigError` where the cache is not this
    user's own.
    """
    if config.model.weights != "random":
        private_folder(Path(config.data.cache), "data.cache")
        open_or_make(str(_home(config)), weights_directory(config).name, lambda home: _write(config, home))


def _write(config: Config, directory: Path) -> None:
    with torch.device("meta"):
        model = AlphaFold(sizes_for(config))
    model = model.to_empty(device="cpu")
    read_weights(model, Path(config.model.weights).expanduser())
    names = openfold_names(model)
    save_file({names[name]: param.detach() for name, param in model.named_parameters()}, directory / FILE)
