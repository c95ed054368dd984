"""How a process becomes a rank, and how ranks started by someone else agree on what to do."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cai_apps.run import checkpoint
from cai_apps.run.directory import RunDirectory
from cai_apps.run.task import Job, Task

PREPARE_TIMEOUT = timedelta(hours=12)
"""How long ranks wait for one of them to prepare data."""


def make_job(task: Task, config: Any, label: str, device: str) -> Job:
    """Prepares the data and makes the run directory."""
    prepared = task.prepare(config)
    job = Job(task, config, RunDirectory.of(config, label).path, prepared, device)
    _make_directory(job)
    return job


def join_job(task: Task, config: Any, label: str, device: str) -> Job:
    """What every rank of a launcher does instead of `make_job`. Collective; torch.distributed is initialized.

    The first rank of each machine prepares the data while the others wait; rank 0 makes the run directory.
    """
    patient = dist.new_group(backend="gloo", timeout=PREPARE_TIMEOUT)
    path = [Path()]
    if local_rank() == 0:
        prepared = task.prepare(config)
        if dist.get_rank() == 0:
            path = [RunDirectory.of(config, label).path]
            _make_directory(Job(task, config, path[0], prepared, device))
    dist.barrier(patient)
    dist.broadcast_object_list(path, group=patient)
    dist.destroy_process_group(patient)
    return Job(task, config, path[0], task.prepare(config), device)


def _make_directory(job: Job) -> None:
    checkpoint.check(job.config, job.run)
    job.run.create(job.config)
    job.task.fill(job)


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
