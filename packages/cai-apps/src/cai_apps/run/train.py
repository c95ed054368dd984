"""A whole run: check, prepare, train on all ranks, then let the application show what came out."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from cai_apps.config.environment import launched
from cai_apps.config.memory import check_machine
from cai_apps.config.steps import check_traces
from cai_apps.config.validation import mesh_spec
from cai_apps.planner.fit import RECOMPUTE, UNSHARD, Planner, chosen, is_open, settled
from cai_apps.run.files.checkpoint import AUTO
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.health.termination import Guard
from cai_apps.run.launch import devices
from cai_apps.run.launch.agent import launch
from cai_apps.run.launch.job import join_job, make_job
from cai_apps.run.launch.rank import start_rank
from cai_apps.run.launch.shared_errors import said_by_first_rank
from cai_apps.run.task import Job, Task
from cai_apps.run.trackers.table import need
from cai_apps.run.worker import do_job, run_rank
from cai_mesh import checkpoint
from cai_mesh.errors import ConfigError


def train(
    task: Task,
    config: Any,
    *,
    label: str = "run",
    meant: Collection[str] | None = None,
    preload: Collection[str] = (),
) -> RunDirectory:
    """Trains as `config` says and returns the run's directory.

    Args:
        meant: keys that were given for this very start, as on a command line. Where the run directory has checkpoints
            to go on from, another key that changes what is learned must be as it was. None: all of `config` is meant.
        preload: modules that take long to import; ranks that are started here share them.

    Under a launcher (RANK is set) this process is one of its ranks; otherwise the ranks are started here.

    Raises:
        CaiError: anything the user can fix; before any rank starts where it can be known by then.
    """
    if launched():
        return _train_as_rank(task, config, label, meant)
    return _train_here(task, config, label, meant, preload)


def _train_here(
    task: Task, config: Any, label: str, meant: Collection[str] | None, preload: Collection[str]
) -> RunDirectory:
    need(config.log.trackers)
    ranks = None if config.parallel.shard == -1 else mesh_spec(config).world_size
    device, ranks = devices.choose_device(config.train.device, ranks)
    if device == "cpu" and (gpu_count := devices.gpus(config.train.device)):
        print(
            f"{gpu_count} GPU{'s' * (gpu_count > 1)} of this machine are too few for {ranks} ranks: training on the CPU"
        )
    config = task.resolve(config, ranks)
    check_traces(config, ranks)
    check_machine(config, device)
    config = settle(task, config, ranks, device)
    run = RunDirectory.of(config, label)
    with run.held():
        job = make_job(task, config, run, device, meant)
        _announce(job, ranks)
        launch(run_rank, job, ranks=ranks, device=device, preload=(run_rank.__module__, *preload))
        job.task.finish(job)
    return run


def _train_as_rank(task: Task, config: Any, label: str, meant: Collection[str] | None) -> RunDirectory:
    """Rank 0 names and makes the run directory; the first rank of each machine prepares data while the others wait."""
    with said_by_first_rank():
        need(config.log.trackers)
        config = restarted(config)
        device, _ = devices.choose_device(config.train.device, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        ranks = int(os.environ["WORLD_SIZE"])
        config = task.resolve(config, ranks)
        check_traces(config, ranks)
        check_machine(config, device)
        settled = settle(task, config, ranks, device)
    guard = Guard(RunDirectory.of(config, label) if config.log.directory else None)
    place = start_rank(device)
    config = settled if settled is config else agree(settled)
    first = os.environ["RANK"] == "0"
    run = guard.run = _same_directory(RunDirectory.of(config, label))
    with run.held() if first else nullcontext():
        job = join_job(task, config, run, device, meant)
        if first:
            _announce(job, int(os.environ["WORLD_SIZE"]))
        do_job(job, place, guard)
        if first:
            job.task.finish(job)
    torch.distributed.destroy_process_group()
    return run


def _same_directory(run: RunDirectory) -> RunDirectory:
    """Return the run directory of rank 0: its name may have the time in it. Collective."""
    path = [run.path]
    dist.broadcast_object_list(path)
    return RunDirectory(path[0])


def settle(task: Task, config: Any, ranks: int, device: str) -> Any:
    """Return a resolved config with what it leaves to the plan, which the first rank prints.

    torch.distributed is not up yet.
    """
    if not is_open(config):
        return config
    memory = None if device == "cpu" else devices.device_memory()
    choice = Planner(task.resolve, task.workload).choose(config, ranks=ranks, memory=memory)
    if device != "cpu" and os.environ.get("RANK", "0") == "0":
        print(f"{chosen(config, choice.config)}: {choice.reason}", flush=True)
    return choice.config


def restarted(config: Any) -> Any:
    """The config of a rank that its launcher may start again; when it has, it goes on from the run's checkpoints.

    Raises:
        ConfigError: the launcher may start ranks again, which would not know the directory of those before them.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return config
    if config.log.directory is None:
        raise ConfigError(
            "a run with --max-restarts needs a directory",
            cause="ranks that are started again go on from the checkpoints there",
            fix="set log.directory",
        )
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if count == "0":
        return config
    checkpoints = checkpoint.steps(RunDirectory.of(config, "").checkpoints)
    if os.environ["RANK"] == "0":
        where = (
            "from the newest checkpoint" if checkpoints else "from the beginning, as there is no checkpoint"
        )
        limit = os.environ["TORCHELASTIC_MAX_RESTARTS"]
        print(f"ranks were started again ({count} of at most {limit} times): going on {where}", flush=True)
    return replace(config, checkpoint=replace(config.checkpoint, resume=AUTO)) if checkpoints else config


def agree(config: Any) -> Any:
    """The config with what takes least of what ranks have settled on: GPUs of machines may differ. Collective."""
    parallel = config.parallel
    rank_choices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rank_choices, (config.memory.recompute, parallel.zero, parallel.pipeline.unshard))
    recompute = max((form for form, *_ in rank_choices), key=RECOMPUTE.index)
    _, zero, unshard = max(rank_choices, key=lambda choice: (choice[1], UNSHARD.index(choice[2])))
    config = replace(config, parallel=replace(parallel, zero=zero))
    return settled(config, recompute=recompute, unshard=unshard)


def _announce(job: Job, ranks: int) -> None:
    parallel = job.config.parallel
    context = f" x context {parallel.context.size}" if parallel.context.size > 1 else ""
    experts = f", experts over {parallel.experts.size}" if parallel.experts.size > 1 else ""
    print(
        f"{job.task.announce(job.config, job.prepared)}: data {parallel.replicate * parallel.shard}"
        f"{context} x tensor {parallel.tensor.size} x pipeline {parallel.pipeline.size}{experts}, ZeRO-{parallel.zero},"
        f" {ranks} {job.device} rank{'s' * (ranks > 1)}",
        flush=True,
    )
