"""Makes the job of a run, in one process or by agreement of ranks that a launcher has started."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cai_apps.run.files import changes, checkpoint, origin
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.launch.rank import local_rank
from cai_apps.run.task import Job, Task
from cai_mesh.checkpoint import contents

PREPARE_TIMEOUT = timedelta(hours=12)
"""How long ranks wait for one of them to prepare data."""


def make_job(
    task: Task, config: Any, run: RunDirectory, device: str, meant: Collection[str] | None = None
) -> Job:
    """Prepare the data and make what the run directory lacks; it is held meanwhile.

    Args:
        meant: as for `cai_apps.run.files.changes.check`, whose errors it has, too.
    """
    _check(config, run, meant)
    job = _job(task, config, run, device, meant)
    _compare(job)
    _make_directory(job)
    return job


def join_job(
    task: Task, config: Any, run: RunDirectory, device: str, meant: Collection[str] | None = None
) -> Job:
    """Make the job on every rank of a launcher, in place of `make_job`. Collective; torch.distributed is initialized.

    The first rank of each machine prepares the data while the others wait; rank 0 makes the run directory.
    """
    patient = dist.new_group(backend="gloo", timeout=PREPARE_TIMEOUT)
    if dist.get_rank() == 0:
        _check(config, run, meant)
    if local_rank() == 0:
        job = _job(task, config, run, device, meant)
        if dist.get_rank() == 0:
            _compare(job)
            _make_directory(job)
    dist.barrier(patient)
    dist.destroy_process_group(patient)
    return _job(task, config, run, device, meant)


def _job(task: Task, config: Any, run: RunDirectory, device: str, meant: Collection[str] | None) -> Job:
    prepared = task.prepare(config, checkpoint.run_before(config, run))
    new_data = meant is None or any(key.startswith("data.") for key in meant)
    return Job(task, config, run.path, prepared, device, new_data, task.base(config))


def _compare(job: Job) -> None:
    """Refuse data that the checkpoint to go on from was not trained on, as far as is known before ranks start."""
    source = checkpoint.newest(job.config, job.run)
    if source is not None:
        origin.check(job.origin, contents(source).values, source, new_data=job.new_data)


def _check(config: Any, run: RunDirectory, meant: Collection[str] | None) -> None:
    """Refuse checkpoints that would be mixed, and changes of a run that goes on, unless they are meant."""
    run.check_kind(config.application)
    checkpoint.check(config, run)
    if checkpoint.goes_on(config, run) and run.config_file.is_file():
        differences = changes.changes(run.config_file, config)
        changes.check(differences, run.path, meant)
        if differences:
            print("the run goes on, changed:", *changes.lines(differences), sep="\n  ", flush=True)


def _make_directory(job: Job) -> None:
    job.run.create(job.config)
    job.task.fill(job)
