"""The export of a checkpoint of any layout to an HF directory, in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from cai_apps.applications.language.config import Config
from cai_apps.applications.language.task import (
    LANGUAGE,
    LanguageTask,
    base_digest,
    tokenizer_directory,
)
from cai_apps.compose.adapter_files import nothing_to_merge
from cai_apps.compose.apply import apply
from cai_apps.compose.models import model_config_for
from cai_apps.compose.weights import MODEL
from cai_apps.config import file as config_file
from cai_apps.config.sections import Memory, Parallel
from cai_apps.data.tokenizer import load_tokenizer
from cai_apps.run.files.finding import find_run
from cai_apps.run.files.origin import ORIGIN, Origin, check_base
from cai_apps.run.launch.rank import start_rank
from cai_mesh import checkpoint
from cai_mesh.layout import BoxedTensor


def export(path: Path, directory: Path, *, merge: bool = False, task: LanguageTask = LANGUAGE) -> Path:
    """Write the weights of a run's newest checkpoint, or of the checkpoint `path`.

    A run with adapters gives a folder of peft, another an HF directory.

    Args:
        path: a run directory, or one of its checkpoints.
        directory: the directory to write.
        merge: write an HF directory with adapters in the weights of their layers.
        task: the task of the run.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or its base is another one now.
        ConfigError: `merge`, and the run has no adapters.
    """
    run, source = find_run(path)
    config = _alone(config_file.read(run.config_file, task.config))  # it was resolved when the run began
    if merge or not config.lora.rank:
        config = task.resolve(config, 1)
    if merge and not config.lora.rank:
        raise nothing_to_merge(run.path)
    tokenizer = tokenizer_directory(run)
    model = model_config_for(config.model.name, load_tokenizer(tokenizer))
    device = start_rank("cpu")
    try:
        if config.lora.rank and not merge:
            weights, digest = _trained(source)
            task.write_adapter(weights, config, model, directory, tokenizer, digest)
            return directory
        _check_base(source, config)
        session = apply(config, task.workload_of(config, model), device=device)
        session.loaded(checkpoint.load(source, session.state()), 0)
        task.write_model(session, directory, tokenizer)
    finally:
        dist.destroy_process_group()
    return directory


def _trained(source: Path) -> tuple[dict[str, BoxedTensor], str | None]:
    """Return what a checkpoint of adapters holds of weights, and the digest of the base; the base is not read."""
    tensors = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in checkpoint.contents(source).tensors.items()
    }
    values = checkpoint.load(source, tensors)
    weights = {
        name.removeprefix(MODEL): BoxedTensor.from_param(value)
        for name, value in tensors.items()
        if name.startswith(MODEL)
    }
    return weights, Origin(**values[ORIGIN]).base if ORIGIN in values else None


def _check_base(source: Path, config: Config) -> None:
    """Raise CheckpointError where the weights beside a checkpoint's adapters are others now."""
    values = checkpoint.contents(source).values
    if ORIGIN in values:
        check_base(Origin(**values[ORIGIN]).base, base_digest(config), source)


def _alone(config: Config) -> Config:
    """The same model on one rank; values of adapters are those of the checkpoint."""
    lora = replace(config.lora, adapter=None)
    return replace(config, parallel=Parallel(zero=0), memory=Memory(), lora=lora)
