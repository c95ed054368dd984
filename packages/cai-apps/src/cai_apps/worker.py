"""What one rank does from its start to the export."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.apply import apply
from cai_apps.config import Config
from cai_apps.data.batches import Batches, split
from cai_apps.data.prepare import Prepared
from cai_apps.data.tokenizer import load_tokenizer
from cai_apps.flops import token_flops
from cai_apps.loop import Loop, Position
from cai_apps.metrics import Metrics, MetricsFile
from cai_apps.models import load_model_config, meta_model
from cai_apps.progress import open_progress
from cai_apps.run_directory import RunDirectory
from cai_mesh.axes import DATA_AXES
from cai_mesh.build import degree, index


@dataclass(frozen=True)
class Job:
    """Everything a rank needs to know; decided once, before the ranks start."""

    config: Config
    directory: Path
    prepared: Prepared
    device: str
    """"cpu" or "cuda"."""

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.directory)


def start_rank(device_type: str) -> torch.device:
    """Joins the process group with the environment's rank, or makes a group of one; the rank's device."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    device = (
        torch.device(device_type, int(os.environ.get("LOCAL_RANK", 0)))
        if device_type == "cuda"
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def run_rank(job: Job) -> None:
    """Trains, then writes the export. A failure leaves its traceback in crash/ and is raised again."""
    device = start_rank(job.device)
    try:
        train(job, device)
    except BaseException as error:
        job.run.record_crash(dist.get_rank(), error)
        raise
    dist.destroy_process_group()


def train(job: Job, device: torch.device) -> None:
    config, tokenizer = job.config, load_tokenizer(job.prepared.tokenizer)
    model_config = load_model_config(config.model.name)
    model_config.bos_token_id, model_config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    flops = token_flops(meta_model(model_config), model_config, config.data.sequence_length)
    session = apply(config, model_config, device=device)
    training, validation = batches(config, job.prepared, session.mesh)
    position = Position()
    recorder = Recorder(job, position) if dist.get_rank() == 0 else None

    def on_step(metrics: Metrics, _: Position) -> None:
        if recorder:
            recorder.record(metrics)

    try:
        position = Loop(session, training, validation, device, flops, on_step).run(position)
    finally:
        if recorder:
            recorder.close()
    session.export(job.run.export, tokenizer)


def batches(config: Config, prepared: Prepared, mesh: DeviceMesh) -> tuple[Batches, Batches | None]:
    """What this rank's data coordinate reads for training and, where the split has any, for validation."""
    training, validation = split(prepared, config.data.sequence_length, config.data.validation_fraction)
    rank, ranks = index(mesh, DATA_AXES), degree(mesh, DATA_AXES)
    sizes = (config.train.global_batch, config.train.microbatch_size, rank, ranks)
    held_out = Batches(validation, *sizes, seed=None) if validation.size else None
    return Batches(training, *sizes, seed=config.train.seed), held_out


class Recorder:
    """Rank 0's view of the run: the metrics file and the display."""

    def __init__(self, job: Job, position: Position):
        self._file = MetricsFile(job.run.metrics, from_step=position.step)
        self._progress = open_progress(
            job.config.train.steps, start=position.step, every=job.config.log.every
        )

    def record(self, metrics: Metrics) -> None:
        self._file.write(metrics)
        self._progress.update(metrics)

    def close(self) -> None:
        self._file.close()
        self._progress.close()
