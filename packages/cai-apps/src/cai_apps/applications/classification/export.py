"""The export of a model that classifies: its weights, its classes, and what prepares texts or pictures for it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from cai_apps.applications.classification.config import Config
from cai_apps.applications.classification.model import config_for, kind_of, on_meta
from cai_apps.applications.classification.pictures import PROCESSOR
from cai_apps.applications.classification.texts import load_tokenizer
from cai_apps.applications.classification.workload import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.conversions import saved_tensors
from cai_apps.compose.sharding import DTYPES
from cai_apps.config import file as config_file
from cai_apps.config import validation
from cai_apps.config.sections import Memory, Parallel
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.finding import find_run
from cai_apps.run.launch.rank import start_rank
from cai_mesh import checkpoint
from cai_mesh.checkpoint import save_hf
from cai_mesh.files import write_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from cai_apps.compose.session import Session

TOKENIZER, FACTS = "tokenizer", "classes.json"
"""What a run's directory has beside its checkpoints: the tokenizer, and the classes and how pictures are prepared."""


def model_config(run: RunDirectory, name: str) -> PretrainedConfig:
    """Return the config of a run's model, with its classes.

    Args:
        run: the run.
        name: the name that the model's shape is found by.
    """
    facts = json.loads((run.path / FACTS).read_text(encoding="utf-8"))
    place = run.path / TOKENIZER
    return config_for(name, facts["classes"], load_tokenizer(place).pad_token_id if place.is_dir() else None)


def write_model(session: Session, run: RunDirectory, directory: Path) -> None:
    """Write the model of a session as an HF directory. Collective."""
    model: Any = session.model
    kind = kind_of(model.config, session.config.model.name)  # type: ignore[attr-defined]
    save_hf(
        model,
        directory,
        weights=session.weights.masters(),
        dtype=DTYPES[session.config.precision.compute],
        tensors=partial(saved_tensors, on_meta(model.config, kind)),
    )
    if dist.get_rank() == 0:
        processor = json.loads((run.path / FACTS).read_text(encoding="utf-8"))["processor"]
        if processor is not None:
            write_text(directory / PROCESSOR, json.dumps(processor, indent=2))
        else:
            load_tokenizer(run.path / TOKENIZER).save_pretrained(directory)
    dist.barrier()


def export(path: Path, directory: Path) -> Path:
    """Write the weights of a run's newest checkpoint, or of the checkpoint `path`, as an HF directory.

    Args:
        path: a run directory, or one of its checkpoints.
        directory: the directory to write.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    run, source = find_run(path)
    resolved = config_file.read(run.config_file, Config)
    config = validation.resolve(replace(resolved, parallel=Parallel(zero=0), memory=Memory()), 1)
    model = model_config(run, config.model.name)
    device = start_rank("cpu")
    try:
        session = apply(config, workload(config, model, kind_of(model, config.model.name)), device=device)
        session.loaded(checkpoint.load(source, session.state()), 0)
        write_model(session, run, directory)
    finally:
        dist.destroy_process_group()
    return directory
