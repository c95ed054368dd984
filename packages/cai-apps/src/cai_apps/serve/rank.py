"""The life of a process that has a model, or its part of one: it opens it, works, and says why it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cai_apps.engine import EngineOptions
from cai_apps.serve.follower import FollowingWorker
from cai_apps.serve.pulse import Marks, start_pulse
from cai_apps.serve.wire import Failed
from cai_apps.serve.worker import Worker
from cai_mesh.errors import CaiError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from cai_apps.applications.language.generate import Place
    from cai_apps.config.sections import BaseKind
    from cai_apps.engine import LLM
    from cai_apps.serve.wire import Pipes

MEETING_SECONDS = 300
"""Seconds that ranks wait for each other when they start."""
REASON_LETTERS = 2000
"""Letters of a reason: what is written to a pipe at once stays together, whatever thread writes beside it."""


@dataclass(frozen=True)
class WorkerOptions:
    """What the ranks of a model serve.

    Args:
        directory: a directory that `cai_apps.applications.language.generate.place_of` takes, or a run.
        adapter: a folder of peft with an adapter for the model.
        base: the form of the linear layers of its blocks.
        engine: the size of the engine.
        gpus: the number of each rank's GPU among those that are visible; None: they compute on the host.
        tensor: tensor ranks.
        pipeline: stages.
    """

    directory: Path
    adapter: Path | None = None
    base: BaseKind | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)
    gpus: tuple[int, ...] | None = None
    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor * self.pipeline


def run_rank(pipes: Pipes, options: WorkerOptions, rank: int) -> None:
    """Open a model and work until the server is gone. Runs in a process of its own."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_IGN
        )  # a terminal and systemd signal all processes: the server ends this one
    worker: Worker | FollowingWorker | None = None
    marks = Marks()
    start_pulse(pipes.pulse, marks)
    try:
        llm = _open(pipes, options, rank)
        worker = Worker(pipes, llm, marks) if rank == 0 else FollowingWorker(pipes, llm, marks)
        worker.work()
    except EOFError:
        os._exit(0)
    except BaseException as error:
        _tell(pipes, error, is_left=worker is not None and worker.has_lost_a_rank())
        sys.stderr.flush()
        os._exit(1)  # threads may compile, and a GPU's driver may hang where a kernel failed


def _tell(pipes: Pipes, error: BaseException, *, is_left: bool) -> None:
    """Say why a rank ends. Where another one has ended before it, that is the reason, whatever this one met."""
    is_user_error = isinstance(error, CaiError)
    text = str(error) if is_user_error else f"{type(error).__name__}: {error}"
    if is_left:
        text = "another rank of the model has ended"
    elif not is_user_error:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        (pipes.server or pipes.pulse).send(Failed(text[:REASON_LETTERS], is_user_error))


def _open(pipes: Pipes, options: WorkerOptions, rank: int) -> LLM:
    """Return the engine over a model, which has computed something."""
    import torch

    from cai_apps.applications.language.generate import exported, place_of

    device = torch.device("cpu")
    if options.gpus is not None:
        device = torch.device("cuda", options.gpus[rank])
        torch.cuda.set_device(device)
    directory, base = exported(options.directory, options.base)
    place = place_of(directory, options.adapter, base=base)
    if options.ranks > 1:
        return _opened_together(place, options, _meet(pipes, options, rank, device), device)
    return _opened(place, options)


def _opened(place: Place, options: WorkerOptions) -> LLM:
    """Return the engine over a model that this process has alone."""
    from cai_apps.applications.language.generate import Writer
    from cai_apps.data.tokenizer import load_tokenizer

    writer = Writer(place, load_tokenizer(place.tokenizer), options.engine)
    if writer.llm is None:
        raise ConfigError(
            f"the engine does not compute the model of {place.model}, so that it cannot be served",
            cause=writer.refusal,
            fix="`cai generate` lets transformers compute it, one prompt at a time",
        )
    writer.check_finite([writer.tokenizer.eos_token_id])
    return writer.llm


def _opened_together(place: Place, options: WorkerOptions, mesh: DeviceMesh, device: torch.device) -> LLM:
    """Return the engine over this rank's part of a model."""
    from cai_apps.applications.language.ranked import open_over_ranks
    from cai_apps.data.tokenizer import load_tokenizer
    from cai_apps.engine import LLM

    model = open_over_ranks(place, mesh, device)
    llm = LLM(model, load_tokenizer(place.tokenizer), options=options.engine, trains=False, ranks=mesh)
    llm.generate([[llm.tokenizer.eos_token_id]], max_tokens=1, temperature=0)  # type: ignore[union-attr]
    return llm


def _meet(pipes: Pipes, options: WorkerOptions, rank: int, device: torch.device) -> DeviceMesh:
    """Return the mesh of the ranks, which meet on loopback at a port that the first one says."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from cai_apps.run.launch.loopback import ADDRESS, store, use_loopback

    use_loopback()
    shared: Any
    if pipes.first is None:
        shared = store(0, MEETING_SECONDS)
        for connection in pipes.followers:
            connection.send(shared.port)
    else:
        port = pipes.first.recv()
        shared = dist.TCPStore(ADDRESS, port, is_master=False, timeout=timedelta(seconds=MEETING_SECONDS))
    is_gpu = device.type == "cuda"
    if not is_gpu:
        torch.set_num_threads(max(1, torch.get_num_threads() // options.ranks))
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        store=shared,
        rank=rank,
        world_size=options.ranks,
        device_id=device if is_gpu else None,
    )
    return init_device_mesh(device.type, (options.pipeline, options.tensor), mesh_dim_names=("pp", "tp"))
