"""A causal language model as a run sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cai_apps.applications.language.config import Config
from cai_apps.applications.language.generate import generate
from cai_apps.applications.language.validation import resolve
from cai_apps.compose.conversions import saved_tensors
from cai_apps.compose.losses import NextTokenLoss
from cai_apps.compose.models import (
    causal_model,
    check_made,
    initializer,
    load_model_config,
    meta_model,
    model_config_for,
    pretrained_directory,
)
from cai_apps.compose.positions import PositionsKnown
from cai_apps.compose.published_names import present_tensors
from cai_apps.compose.sharding import DTYPES
from cai_apps.compose.workload import Workload
from cai_apps.data.packed import blank, count_targets, split
from cai_apps.data.prepare import Prepared, prepare
from cai_apps.data.tokenizer import load_tokenizer, tokenizer_digest
from cai_apps.planner.flops import token_flops
from cai_apps.report.outcome import show_outcome
from cai_apps.run.files.origin import Origin
from cai_apps.run.files.position import Unit
from cai_apps.run.task import Work
from cai_mesh.checkpoint import load_hf, save_hf
from cai_mesh.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from cai_apps.compose.session import Session
    from cai_apps.run.files.directory import RunDirectory
    from cai_apps.run.task import Job


def tokenizer_directory(run: RunDirectory) -> Path:
    """Where a run keeps its tokenizer."""
    return run.path / "tokenizer"


def tokenizer_of(run: RunDirectory, config: Config) -> Path | None:
    """Return the directory of the tokenizer of a run that is gone on with; None: it has none.

    Raises:
        ConfigError: `data.tokenizer` names one that gives a text other ids.
    """
    directory = tokenizer_directory(run)
    if not directory.is_dir():
        return None
    if config.data.tokenizer == "train":
        return directory
    try:
        named = tokenizer_digest(load_tokenizer(config.data.tokenizer))
    except ConfigError:  # gone, or no way to the hub: the run has its own
        return directory
    if named != tokenizer_digest(load_tokenizer(directory)):
        raise ConfigError(
            f"the tokenizer {config.data.tokenizer!r} is not the one that {run.path} was trained with",
            cause="it is another one, or it was edited: its ids would mean something else to the run's weights",
            fix=f"set data.tokenizer to {directory}, or begin a new run in another log.directory",
        )
    return directory


def workload(config: Config, model: PretrainedConfig) -> Workload:
    """A causal language model of transformers, and its loss on the next token."""
    return Workload(
        build=lambda: causal_model(model),
        inputs=lambda batch: {"input_ids": batch["input_ids"]},
        target=lambda batch: batch["labels"],
        loss=partial(NextTokenLoss.of, mode=config.parallel.tensor.mode, kernels=config.train.kernels),
        example=lambda samples: _example(samples, config.data.sequence_length),
        initializer=initializer,
        running=PositionsKnown(),
        pretrained=_pretrained(config),
    )


def _pretrained(config: Config) -> Callable[[nn.Module], None] | None:
    if config.model.weights != "pretrained":
        return None
    directory = pretrained_directory(config.model.name)
    tensors = partial(present_tensors, meta_model(load_model_config(config.model.name)))
    return lambda model: load_hf(model, directory, tensors=tensors)


def _example(samples: int, length: int) -> dict[str, Tensor]:
    ids = torch.zeros(samples, length, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


class LanguageTask:
    """`cai_apps.run.task.Task` of language models."""

    def resolve(self, config: Config, ranks: int) -> Config:
        return resolve(config, load_model_config(config.model.name), ranks)

    def workload(self, config: Config) -> Workload:
        return workload(config, load_model_config(config.model.name))

    def prepare(self, config: Config, before: RunDirectory | None = None) -> Prepared:
        check_made(config.model.name)
        rows = load_model_config(config.model.name).vocab_size
        prepared = prepare(config.data, rows, None if before is None else tokenizer_of(before, config))
        training, _ = split(prepared, config.data.sequence_length, config.data.validation_fraction)
        if training.size < config.train.global_batch:
            raise DataError(
                "a global batch has more samples than the data",
                got=f"train.global_batch = {config.train.global_batch}, {training.size} sequences of "
                f"{config.data.sequence_length} tokens",
                cause="one step would read the same text several times",
                fix=f"set train.global_batch to {training.size} or less, or give more text",
            )
        return prepared

    def announce(self, config: Config, prepared: Prepared) -> str:
        return f"{config.model.name} on {prepared.tokens:,} tokens of text"

    def origin(self, prepared: Prepared) -> Origin:
        return Origin({"tokenizer": prepared.vocabulary}, prepared.text, f"{prepared.tokens:,} tokens")

    def fill(self, job: Job) -> None:
        load_tokenizer(job.prepared.tokenizer).save_pretrained(tokenizer_directory(job.run))

    def work(self, job: Job) -> Work:
        config: Config = job.config
        length = config.data.sequence_length
        model = model_config_for(config.model.name, load_tokenizer(tokenizer_directory(job.run)))
        flops = token_flops(meta_model(model), model, length)
        training, validation = split(job.prepared, length, config.data.validation_fraction)
        return Work(
            workload(config, model),
            training,
            validation if validation.size else None,
            count=count_targets,
            counted="target tokens",
            unit=Unit("tokens", length),
            blank=blank,
            flops={"mfu": flops.causal * length, "mfu_full_attention": flops.full * length},
        )

    def export(self, session: Session, job: Job) -> None:
        export_hf(session, job.run.export, tokenizer_directory(job.run))

    def finish(self, job: Job) -> None:
        show_outcome(job.run, job.config)
        print(f"HF export      {job.run.export}")
        if job.config.log.sample_tokens:
            print(f"sample         {generate(job.run.export, tokens=job.config.log.sample_tokens)}")


LANGUAGE = LanguageTask()


def export_hf(session: Session, directory: Path, tokenizer: Path) -> None:
    """Write a Hugging Face directory, in the compute dtype, from the master weights. Collective.

    Tensors have the names and the cuts of files on the hub: each expert of a layer stands by itself.
    """
    dtype = DTYPES[session.config.precision.compute]
    model: Any = session.model
    tensors = partial(saved_tensors, meta_model(model.config))
    save_hf(session.model, directory, weights=session.weights.masters(), dtype=dtype, tensors=tensors)
    if dist.get_rank() == 0:
        load_tokenizer(tokenizer).save_pretrained(directory)
    dist.barrier()
