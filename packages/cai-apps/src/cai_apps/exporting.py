"""HF directories: of a session that trains, and of a checkpoint of any layout in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from cai_apps import config_file
from cai_apps.apply import Session, apply
from cai_apps.config import Config, Parallel
from cai_apps.data.tokenizer import load_tokenizer
from cai_apps.models import load_model_config, model_config_for
from cai_apps.ranks import start_rank
from cai_apps.run_directory import RunDirectory
from cai_apps.validate import resolve
from cai_mesh import checkpoint
from cai_mesh.checkpoint import save_hf
from cai_mesh.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def find_run(path: Path) -> tuple[RunDirectory, Path]:
    """The run that a run directory or one of its checkpoints belongs to, and the checkpoint meant.

    Raises:
        CheckpointError: the path is neither, or the run has no checkpoint that verifies.
    """
    path = path.expanduser().absolute()
    for directory in (path, path.parent, path.parent.parent):
        run = RunDirectory(directory)
        if run.config_file.is_file():
            break
    else:
        raise CheckpointError(f"neither a run directory nor a checkpoint of one: {path}")
    found = path if path.parent == run.checkpoints else checkpoint.newest_good(run.checkpoints)[0]
    if found is None:
        raise CheckpointError(
            f"the run {run.path} has no checkpoint that verifies", fix="`cai verify` says why"
        )
    return run, found


def export(path: Path, directory: Path) -> Path:
    """Writes the weights of a run's newest checkpoint, or of the checkpoint `path`, as an HF directory.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    run, source = find_run(path)
    config = _alone(config_file.read(run.config_file))
    tokenizer = load_tokenizer(run.tokenizer)
    config = resolve(config, load_model_config(config.model.name), 1)
    device = start_rank("cpu")
    try:
        session = apply(config, model_config_for(config.model.name, tokenizer), device=device)
        session.loaded(checkpoint.load(source, session.state()), 0)
        write_hf(session, directory, tokenizer)
    finally:
        dist.destroy_process_group()
    return directory


def write_hf(session: Session, directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes the session's model, in master precision, and the tokenizer as an HF directory. Collective.

    Raises:
        CheckpointError: the directory is not empty.
    """
    weights = {
        name.removeprefix("model."): value
        for name, value in session.state().items()
        if name.startswith("model.")
    }
    save_hf(session.model, directory, weights=weights)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(directory)


def _alone(config: Config) -> Config:
    """The same model on one rank, with its weights in the precision that a checkpoint holds."""
    precision = "fp32" if config.precision.compute == "bf16" else config.precision.compute
    return replace(
        config,
        parallel=Parallel(zero=0),
        precision=replace(config.precision, compute=precision),
        memory=type(config.memory)(),
    )
