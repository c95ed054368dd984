"""The export of a model that classifies: its weights, its classes, and what prepares texts or pictures for it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from cai_apps.applications.classification.config import Config
from cai_apps.applications.classification.model import (
    config_for,
    kind_of,
    learned_beside,
    on_meta,
    pretrained,
    with_adapters,
)
from cai_apps.applications.classification.pictures import PROCESSOR
from cai_apps.applications.classification.texts import load_tokenizer
from cai_apps.applications.classification.workload import workload
from cai_apps.compose.adapter_files import nothing_to_merge, save_adapter
from cai_apps.compose.apply import apply
from cai_apps.compose.conversions import saved_tensors
from cai_apps.compose.dora import with_lengths
from cai_apps.compose.lora import merged, peft_options, plain_name, targets_of
from cai_apps.compose.models import pretrained_directory
from cai_apps.compose.sharding import DTYPES
from cai_apps.config import file as config_file
from cai_apps.config import validation
from cai_apps.config.sections import Memory, Parallel
from cai_apps.data.content import digest_of_weights
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.finding import find_run
from cai_apps.run.files.origin import ORIGIN, Origin, check_base
from cai_apps.run.launch.rank import start_rank
from cai_mesh import checkpoint
from cai_mesh.checkpoint import new_directory, save_hf
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
    """Write the model of a session as an HF directory, adapters in the weights of their layers. Collective."""
    model: Any = session.model
    config: Any = session.config
    kind, weights = kind_of(model.config, config.model.name), session.weights.masters()
    if config.lora.rank:
        weights = merged(model, session.trained_weights(), config.lora)
    save_hf(
        model,
        directory,
        weights=weights,
        dtype=DTYPES[config.precision.compute],
        names=plain_name,
        tensors=partial(saved_tensors, on_meta(model.config, kind)),
    )
    if dist.get_rank() == 0:
        _write_preparation(run, directory)
    dist.barrier()


def write_adapter(session: Session, run: RunDirectory, directory: Path, digest: str | None) -> None:
    """Write the adapters of a session, and the head, as a folder of peft. Collective.

    Args:
        session: the session.
        run: its run.
        directory: the folder, which appears whole or not at all.
        digest: the digest of the base's weights.

    Raises:
        CheckpointError: the folder is not empty.
    """
    model: Any = session.model
    config: Any = session.config
    kind = kind_of(model.config, config.model.name)
    place = pretrained_directory(config.model.name)
    plain = on_meta(model.config, kind)
    learned = learned_beside(plain, place)
    options = peft_options(config.lora, targets_of(plain, config.lora, learned))
    options.base_model_name_or_path = str(config.model.name)
    weights = with_lengths(model, session.trained_weights())
    with torch.device("meta"):
        adapted = with_adapters(model.config, kind, config.lora, place)
    with new_directory(directory) as new:
        task_type = "SEQ_CLS" if kind == "texts" else None
        save_adapter(new, weights, adapted, options, digest, task_type, learned)
        new.write(partial(_write_preparation, run, new.temporary), first=True)


def _write_preparation(run: RunDirectory, directory: Path) -> None:
    """Write what prepares texts or pictures for the model: the tokenizer, or the processor."""
    processor = json.loads((run.path / FACTS).read_text(encoding="utf-8"))["processor"]
    if processor is not None:
        write_text(directory / PROCESSOR, json.dumps(processor, indent=2))
    else:
        load_tokenizer(run.path / TOKENIZER).save_pretrained(directory)


def base_digest(config: Config) -> str | None:
    """Return the digest of the weights beside which adapters learn; None: all weights learn."""
    if not config.lora.rank:
        return None
    return digest_of_weights({"": pretrained_directory(config.model.name)}, config.data.cache)


def export(path: Path, directory: Path, *, merge: bool = False) -> Path:
    """Write the weights of a run's newest checkpoint, or of the checkpoint `path`.

    A run with adapters gives a folder of peft, another an HF directory.

    Args:
        path: a run directory, or one of its checkpoints.
        directory: the directory to write.
        merge: write an HF directory with adapters in the weights of their layers.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or its base is another one now.
        ConfigError: `merge`, and the run has no adapters.
    """
    run, source = find_run(path)
    resolved = config_file.read(run.config_file, Config)
    config = validation.resolve(replace(resolved, parallel=Parallel(zero=0), memory=Memory()), 1)
    if merge and not config.lora.rank:
        raise nothing_to_merge(run.path)
    model, digest = model_config(run, config.model.name), base_digest(config)
    kind, fill = kind_of(model, config.model.name), None
    if config.lora.rank:
        check_base(Origin(**checkpoint.contents(source).values[ORIGIN]).base, digest, source)
        fill = pretrained(config.model.name, pretrained_directory(config.model.name), model, kind)
    device = start_rank("cpu")
    try:
        session = apply(config, workload(config, model, kind, pretrained=fill), device=device)
        session.loaded(checkpoint.load(source, session.state()), 0)
        if config.lora.rank and not merge:
            write_adapter(session, run, directory, digest)
        else:
            write_model(session, run, directory)
    finally:
        dist.destroy_process_group()
    return directory
