"""A whole run: check, prepare, train on all ranks, then show what came out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_apps import launch
from cai_apps.config import Config
from cai_apps.models import load_model_config
from cai_apps.run_directory import RunDirectory
from cai_apps.validate import mesh_spec, resolve

if TYPE_CHECKING:
    from cai_apps.worker import Job


def train(config: Config, *, label: str = "run") -> RunDirectory:
    """Trains as `config` says and returns the run's directory.

    Raises:
        CaiError: anything the user can fix; before any rank starts where it can be known by then.
    """
    spec = mesh_spec(config)
    ranks = None if config.parallel.shard == -1 else spec.world_size
    device, ranks = launch.choose_device(config.train.device, ranks)
    config = resolve(config, load_model_config(config.model.name), ranks)
    job = prepare_job(config, label, device)
    _announce(job, ranks)
    from cai_apps.worker import run_rank

    launch.launch(run_rank, job, ranks=ranks, device=device)
    finish(job)
    return job.run


def prepare_job(config: Config, label: str, device: str) -> Job:
    """Tokenizes the data, makes the run directory and gathers both in what the ranks are given."""
    from cai_apps.data.prepare import prepare
    from cai_apps.worker import Job

    prepared = prepare(config.data, load_model_config(config.model.name).vocab_size)
    return Job(config, RunDirectory.create(config, label).path, prepared, device)


def finish(job: Job) -> None:
    """Draws the loss and prints where everything is and a sample of what the export writes."""
    from cai_apps.generate import generate
    from cai_apps.report.plots import draw_loss

    draw_loss(job.run)
    print(f"run directory  {job.directory}")
    print(f"loss plot      {job.run.plots / 'loss.png'}")
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
