"""How a process becomes a rank, and how ranks started by someone else agree on what to do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cai_apps import checkpoint
from cai_apps.config import Config
from cai_apps.data.batches import split
from cai_apps.data.prepare import Prepared, prepare
from cai_apps.data.tokenizer import load_tokenizer
from cai_apps.models import load_model_config
from cai_apps.run_directory import RunDirectory

PREPARE_TIMEOUT = timedelta(hours=12)
"""How long ranks wait for one of them to tokenize."""


@dataclass(frozen=True)
class Job:
    """Everything a rank needs to know; decided once, before training starts."""

    config: Config
    directory: Path
    prepared: Prepared
    device: str
    """"cpu" or "cuda"."""

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.directory)


def make_job(config: Config, label: str, device: str) -> Job:
    """Prepares the data and makes the run directory."""
    prepared = _prepare(config)
    return Job(config, _make_directory(config, label, prepared), prepared, device)


def join_job(config: Config, label: str, device: str) -> Job:
    """What every rank of a launcher does instead of `make_job`. Collective; torch.distributed is initialized.

    The first rank of each machine prepares the data while the others wait; rank 0 makes the run directory.
    """
    patient = dist.new_group(backend="gloo", timeout=PREPARE_TIMEOUT)
    path = [Path()]
    if local_rank() == 0:
        prepared = _prepare(config)
        path = [_make_directory(config, label, prepared) if dist.get_rank() == 0 else Path()]
    dist.barrier(patient)
    dist.broadcast_object_list(path, group=patient)
    dist.destroy_process_group(patient)
    return Job(config, path[0], _prepare(config), device)


def _make_directory(config: Config, label: str, prepared: Prepared) -> Path:
    run = RunDirectory.of(config, label)
    checkpoint.check(config, run)
    run.create(config)
    load_tokenizer(prepared.tokenizer).save_pretrained(run.tokenizer)
    return run.path


def _prepare(config: Config) -> Prepared:
    prepared = prepare(config.data, load_model_config(config.model.name).vocab_size)
    split(
        prepared, config.data.sequence_length, config.data.validation_fraction
    )  # raises when there is too little
    return prepared


def local_rank() -> int:
    """This rank's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def start_rank(device_type: str) -> torch.device:
    """Joins the ranks of the environment, or makes a world of one; returns the rank's device."""
    device = torch.device("cuda", local_rank()) if device_type == "cuda" else torch.device("cpu")
    backend = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if device_type == "cuda" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device
