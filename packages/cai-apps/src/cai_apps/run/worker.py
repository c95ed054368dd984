"""The life of one rank from its start to the export."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Mapping
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.compose.apply import apply
from cai_apps.compose.session import Session
from cai_apps.config.sections import RunConfig
from cai_apps.data.batches import Batches
from cai_apps.run.exit_codes import STOPPED
from cai_apps.run.files import checkpoint, proof
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.files.pipeline_chart import draw_steps
from cai_apps.run.files.position import Position
from cai_apps.run.files.starts import record_start
from cai_apps.run.health.last_activity import LastActivity
from cai_apps.run.health.termination import Guard
from cai_apps.run.health.user_errors import user_error
from cai_apps.run.health.watchdog import Watchdog
from cai_apps.run.launch.rank import start_rank
from cai_apps.run.loop.metrics import Metrics, Records
from cai_apps.run.loop.placement import PlacementWatch
from cai_apps.run.loop.progress import open_progress
from cai_apps.run.loop.training_loop import Loop
from cai_apps.run.probes.probes import Probes
from cai_apps.run.task import Job, Work
from cai_apps.run.trackers.trackers import Trackers
from cai_mesh import checkpoint as files
from cai_mesh.comm import DATA_AXES, degree, index
from cai_mesh.files import remove
from cai_pipeline import PipelineRunner

STORE_SECONDS = 1.0
"""Seconds to wait when the store does not answer: meanwhile the guard finds that the launcher, whose store it is, has
ended, says so and ends this process."""


def run_rank(job: Job) -> None:
    """Join the others as a rank that was started here, do the job and leave."""
    guard = Guard(job.run)
    device = start_rank(job.device)
    try:
        do_job(job, device, guard)
    finally:
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def do_job(job: Job, device: torch.device, guard: Guard | None = None) -> None:
    """Train and export. A failure leaves its traceback in crash/ and is raised again.

    Raises:
        SystemExit: a signal stopped the run, or the step after it failed; with 128 and its number.
    """
    guard = guard or Guard(job.run)
    probes = Probes(job.config.log, job.directory, device)
    try:
        train(job, device, guard, probes)
    except SystemExit:
        raise
    except BaseException as error:
        probes.failed(error)
        if isinstance(error, dist.DistNetworkError):
            time.sleep(STORE_SECONDS)
        job.run.record_crash(dist.get_rank(), error)
        if guard.asked and (user_error(error) is None or isinstance(error, ConnectionError)):
            leave_unfinished(job, error, guard)
        raise
    finally:
        probes.close()
        guard.close()


def train(job: Job, device: torch.device, guard: Guard, probes: Probes) -> None:
    """Do the whole of a rank's work: session, resume, loop with checkpoints, export."""
    work = job.task.work(job)
    if work.completed is not None:
        work = work.completed(device)
    session = apply(job.config, work.workload, device=device)
    training, validation = batches(job.config, work, session.mesh)
    position = checkpoint.resume(session, job.run, job.origin, new_data=job.new_data)
    if dist.get_rank() == 0:
        job.run.record(job.config)
        record_start(job.run, device, ranks=dist.get_world_size(), step=position.step)
    activity = LastActivity(job.run)
    activity.record(f"step {position.step + 1}")
    guard.watch_ranks(lambda: activity.doing, activity.at_file)
    _observe(session.runner, job.run, activity)
    saver = checkpoint.Saver(session, job.run, job.origin)
    saver.check_final(position)
    recorder = Recorder(job, work, position) if dist.get_rank() == 0 else None
    placement = PlacementWatch(session.weights.offloaded, job.run)
    watchdog = Watchdog(job.run, position.step, at=lambda: activity.at)

    def on_step(metrics: Metrics, position: Position) -> None:
        watchdog.after_step(position.step, metrics.step_seconds)
        metrics = placement.after_step(metrics)
        if recorder:
            recorder.record(metrics)
        with watchdog.paused():
            probes.after(position.step)
            save_due(saver, loop, metrics, position)
            if work.after_step is not None:
                work.after_step(session, position.step)
        now = time.strftime("%H:%M:%S")
        activity.record(f"step {position.step + 1} (since {now}; loss of the step before {metrics.loss:.4f})")
        if not loop.stopped:
            probes.before(position.step + 1)

    signals, by_clock, paused = (lambda: guard.asked), saver.by_clock, watchdog.paused
    loop = Loop(session, work, training, validation, device, on_step, signals, by_clock, paused)
    guard.take_signals()
    probes.before(position.step + 1)
    try:
        position = loop.run(position)
        if loop.stopped and saver.step != position.step:
            saver.save(position)
        saver.wait()
    finally:
        watchdog.close()
        if loop.last_finite is not None:
            doubt_checkpoints(job, saver, loop.last_finite)
        if recorder:
            recorder.close()
        if not loop.stopped:
            guard.leave_signals()
    if loop.stopped:
        leave(job, position, loop.stopped, guard)
    activity.record("the export")
    tell_early_end(job, loop, position)
    _export(session, job)
    guard.close()


def save_due(saver: checkpoint.Saver, loop: Loop, metrics: Metrics, position: Position) -> None:
    """Save what is due after a step: a checkpoint on the way or at the end, and the best one. Collective."""
    config = loop.session.config
    is_last = position.step == config.train.steps or loop.ends(position)
    if checkpoint.is_due(config, position, left_out=metrics.left_out, by_clock=loop.due):
        saver.save(position, required=is_last)
    if config.checkpoint.best and position.standing.step == position.step:
        saver.save_best(position)


def tell_early_end(job: Job, loop: Loop, position: Position) -> None:
    """Print on the first rank why a run ended before its last step, if it did."""
    if loop.ends(position) and dist.get_rank() == 0:
        options = job.config.early_stopping
        print(position.standing.reason(position.step, job.config.train.steps, options), flush=True)


def _observe(runner: PipelineRunner, run: RunDirectory, activity: LastActivity) -> None:
    """Have the actions of a pipeline noted, and a step of it drawn."""
    runner.observers.on_action = lambda action: activity.record_at("" if action is None else action.phrase)
    runner.observers.on_recorded = lambda ran, simulated: (
        draw_steps(run, ran, simulated) if dist.get_rank() == 0 else None
    )


def _export(session: Session, job: Job) -> None:
    """Write the export anew. Collective."""
    if dist.get_rank() == 0:
        remove(job.run.export)  # of a shorter run in the same directory
    dist.barrier()
    job.task.export(session, job)
    dist.barrier()


def leave(job: Job, position: Position, stopped: int, guard: Guard) -> NoReturn:
    """End a rank of a run that a signal stopped, and whose checkpoint is written. Collective."""
    if dist.get_rank() == 0:
        print(
            f"stopped by {signal.Signals(stopped).name} after step {position.step} of {job.config.train.steps};"
            f" go on with {_to_go_on(job)}",
            flush=True,
        )
    dist.barrier()
    guard.close()
    dist.destroy_process_group()  # NCCL warns of a process that ends without it
    sys.exit(STOPPED[stopped])


def doubt_checkpoints(job: Job, saver: checkpoint.Saver, last_finite: int) -> None:
    """Write down which checkpoints are unproven, and print how the run goes on, where it has one for that."""
    saver.doubt(last_finite)
    steps = files.steps(job.run.checkpoints)
    if dist.get_rank() == 0 and set(steps) - proof.unproven(job.run.checkpoints, steps):
        print(f"go on with {_to_go_on(job)} and a lower --optimizer.lr", flush=True)


def leave_unfinished(job: Job, error: BaseException, guard: Guard) -> NoReturn:
    """End a rank that was asked to stop and failed in the step that was to be its last.

    A signal to all processes of a job ends the compilers too that a rank waits for. What the user can mend, as a disk
    that is full, is not for here: it is told as ever.
    """
    rank = dist.get_rank()
    print(
        f"rank {rank} was stopped by {signal.Signals(guard.asked).name} in {guard.doing()}, which failed:"
        f" {type(error).__name__}, see {job.run.crash / f'rank-{rank}.txt'}; start again with {_to_go_on(job)}",
        flush=True,
    )
    sys.exit(STOPPED[signal.Signals(guard.asked)])


def _to_go_on(job: Job) -> str:
    resume = "" if job.config.checkpoint.resume == checkpoint.AUTO else " --checkpoint.resume auto"
    return f"--log.directory {shlex.quote(str(job.directory))}{resume}"


def batches(config: RunConfig, work: Work, mesh: DeviceMesh) -> tuple[Batches, Batches | None]:
    """Return what this rank's data coordinate reads for training and, where there is any, for validation."""
    rank, ranks = index(mesh, DATA_AXES), degree(mesh, DATA_AXES)
    sizes = (config.train.global_batch, config.train.microbatch_size, rank, ranks)
    held_out = (
        Batches(work.validation, *sizes, seed=None, blank=work.blank) if work.validation is not None else None
    )
    return Batches(work.training, *sizes, seed=None if work.in_order else config.train.seed), held_out


class Recorder:
    """Rank 0's view of the run: its files, the display and the trackers."""

    def __init__(self, job: Job, work: Work, position: Position):
        self._file = Records(job.run.metrics, from_step=position.step)
        written, step = self._file.before, position.step
        self._trackers = Trackers(job.config, job.run, step=step, written=written)
        speaks = work.texts is not None or job.run.texts.exists()
        self._texts = Records(job.run.texts, from_step=position.step) if speaks else None
        experts = work.workload.experts
        self._progress = open_progress(
            job.config.train.steps,
            start=position.step,
            every=job.config.log.every,
            shows_load=experts is not None and experts.show,
        )

    def record(self, metrics: Metrics) -> None:
        record = metrics.record()
        self._file.write(record)
        for name, text in metrics.texts.items():
            assert self._texts is not None
            self._texts.write({"step": metrics.step, "name": name, "text": text})
        self._progress.update(metrics)
        self._trackers.record(record, _numbered(metrics.texts))

    def close(self) -> None:
        self._file.close()
        if self._texts is not None:
            self._texts.close()
        self._progress.close()
        self._trackers.close()


def _numbered(texts: Mapping[str, str]) -> dict[str, str]:
    """Return texts with what they go on from, by short names."""
    return {
        f"samples/{number}": f"{name}\n---\n{text}" for number, (name, text) in enumerate(texts.items(), 1)
    }
