"""A whole run: check, prepare, train on all ranks, then show what came out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cai_apps import launch
from cai_apps.config import Config
from cai_apps.models import load_model_config
from cai_apps.residency import check_machine
from cai_apps.run_directory import RunDirectory
from cai_apps.validate import launched, mesh_spec, resolve
from cai_mesh.errors import CaiError

if TYPE_CHECKING:
    from cai_apps.ranks import Job


def train(config: Config, *, label: str = "run") -> RunDirectory:
    """Trains as `config` says and returns the run's directory.

    Under a launcher (RANK is set) this process is one of its ranks; otherwise the ranks are started here.

    Raises:
        CaiError: anything the user can fix; before any rank starts where it can be known by then.
    """
    return _train_as_rank(config, label) if launched() else _train_here(config, label)


def _train_here(config: Config, label: str) -> RunDirectory:
    ranks = None if config.parallel.shard == -1 else mesh_spec(config).world_size
    device, ranks = launch.choose_device(config.train.device, ranks)
    if device == "cpu" and (found := launch.gpus(config.train.device)):
        print(
            f"{found} GPU{'s' * (found > 1)} of this machine are too few for {ranks} ranks: training on the CPU"
        )
    config = resolve(config, load_model_config(config.model.name), ranks)
    check_machine(config, device)
    from cai_apps.ranks import make_job
    from cai_apps.worker import run_rank

    job = make_job(config, label, device)
    _announce(job, ranks)
    launch.launch(run_rank, job, ranks=ranks, device=device)
    finish(job)
    return job.run


def _train_as_rank(config: Config, label: str) -> RunDirectory:
    """Rank 0 names and makes the run directory; the first rank of each machine tokenizes while the others wait."""
    with _said_by_first_rank():
        device, _ = launch.choose_device(config.train.device, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        config = resolve(config, load_model_config(config.model.name), int(os.environ["WORLD_SIZE"]))
        check_machine(config, device)
    import torch

    from cai_apps.ranks import join_job, start_rank
    from cai_apps.worker import do_job

    place = start_rank(device)
    job = join_job(config, label, device)
    first = os.environ["RANK"] == "0"
    if first:
        _announce(job, int(os.environ["WORLD_SIZE"]))
    do_job(job, place)
    if first:
        finish(job)
    torch.distributed.destroy_process_group()
    return job.run


@contextmanager
def _said_by_first_rank() -> Iterator[None]:
    """For errors that every rank finds alike: the other ranks leave in silence, after rank 0 has had time to speak."""
    try:
        yield
    except CaiError:
        if os.environ["RANK"] == "0":
            raise
        time.sleep(launch.GRACE_SECONDS)
        sys.exit(launch.USER_ERROR)


def finish(job: Job) -> None:
    """Draws the plots and prints where everything is and a sample of what the export writes."""
    from cai_apps.generate import generate
    from cai_apps.report.chart import draw_pipeline
    from cai_apps.report.plots import draw_loss
    from cai_mesh.checkpoint import latest

    print(f"run directory  {job.directory}")
    print(f"loss plot      {draw_loss(job.run)}")
    if chart := draw_pipeline(job.run, job.config):
        print(f"pipeline chart {chart}")
    if newest := latest(job.run.checkpoints):
        print(f"checkpoint     {newest}")
    print(f"HF export      {job.run.export}")
    if job.config.log.sample_tokens:
        print(f"sample         {generate(job.run.export, tokens=job.config.log.sample_tokens)}")


def _announce(job: Job, ranks: int) -> None:
    parallel = job.config.parallel
    print(
        f"{job.config.model.name}: data {parallel.replicate * parallel.shard} x tensor {parallel.tensor.size}"
        f" x pipeline {parallel.pipeline.size}, ZeRO-{parallel.zero},"
        f" {ranks} {job.device} rank{'s' * (ranks > 1)}, {job.prepared.tokens:,} tokens of text",
        flush=True,
    )
