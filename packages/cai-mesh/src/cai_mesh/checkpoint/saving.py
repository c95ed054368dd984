"""Saving: plan together, copy or refer, write apart, commit together."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from cai_mesh.checkpoint import commit
from cai_mesh.checkpoint.planner import BoxSavePlanner
from cai_mesh.comm.collectives import all_gather_object
from cai_mesh.errors import CheckpointError
from cai_mesh.layout.boxed import BoxedTensor


class Saving:
    """A save that may still be under way."""

    def __init__(self, run: Callable[[], Path], *, background: bool):
        self._result: Path | None = None
        self._error: BaseException | None = None
        self._run = run
        self._thread = threading.Thread(target=self._work, name="checkpoint") if background else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._work()
            self.wait()

    def _work(self) -> None:
        try:
            self._result = self._run()
        except BaseException as error:  # handed to whoever waits
            self._error = error

    def done(self) -> bool:
        """Whether the checkpoint is committed or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """The committed directory. Raises what went wrong on this or another rank."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def control_group() -> dist.ProcessGroup | None:
    """The group of all ranks for control data; None in a job of one process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD


def as_boxes(state: Mapping[str, Any]) -> tuple[dict[str, BoxedTensor], dict[str, Any]]:
    """Split a state into boxed tensors and plain values. Raises `CheckpointError` for what JSON cannot hold."""
    boxes: dict[str, BoxedTensor] = {}
    values: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, BoxedTensor):
            boxes[name] = value
        elif isinstance(value, torch.Tensor):
            boxes[name] = BoxedTensor.from_param(value)
        else:
            try:
                values[name] = json.loads(json.dumps(value))
            except (TypeError, ValueError):
                raise CheckpointError(
                    f"state {name!r} cannot be saved",
                    got=type(value).__name__,
                    expected="a tensor or what JSON can hold",
                ) from None
    return boxes, values


def save(
    directory: str | os.PathLike,
    state: Mapping[str, Any],
    *,
    step: int,
    keep_last: int | None = None,
    async_: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Saving:
    """Write `directory/step-N`. Collective over all ranks of the job; the directory must be one all of them see.

    Args:
        state: flat names to tensors (full, with an attached `Layout`, DTensors), `BoxedTensor`s, or values JSON can
            hold (rank 0's are written). Every box is written once, whoever holds copies.
        step: a step is never overwritten; a damaged checkpoint of it is moved aside.
        keep_last: committed checkpoints to keep, this one included; None keeps all.
        async_: copy what this rank writes to host memory, return, and write in a thread. Values changed after the
            call are not seen. Wait for the last `Saving` before the next save, so there is one copy at most.
        group: gloo group of all ranks for the thread's own coordination; None makes one when `async_` needs it.

    Raises `CheckpointError` (from `Saving.wait` when async) when the step exists, a value cannot be saved, or a rank
    failed to write: the temporary directory then stays behind and earlier checkpoints are untouched.
    """
    directory, boxes_values = Path(directory), as_boxes(state)
    boxes, values = boxes_values
    if keep_last is not None and keep_last < 1:
        raise CheckpointError("keep_last must leave at least one checkpoint", got=keep_last)
    control = control_group()
    if async_ and control is not None and group is None:
        group = dist.new_group(backend="gloo")  # type: ignore[assignment]
    rank = dist.get_rank() if control is not None else 0
    temporary = _agreed(lambda: commit.begin(directory, step) if rank == 0 else None, control)[0]
    planner = BoxSavePlanner()
    planner.set_up_planner(boxes)
    plans, metadata = planner.create_global_plan(all_gather_object(planner.create_local_plan(), control))
    plan = plans[rank]
    if async_:
        planner.set_up_planner(_staged(boxes, plan))

    def write() -> Path:
        channel = group if async_ else control
        writer = FileSystemWriter(temporary, sync_files=True, per_thread_copy_ahead=0)
        written = _agreed(lambda: _write(writer, plan, planner, rank), channel)
        results = [result for results, _ in written for result in results]
        files = {name: entry for _, entries in written for name, entry in entries.items()}

        def finish() -> Path | None:
            if rank:
                return None
            writer.finish(metadata, [results])
            (temporary / commit.VALUES).write_text(json.dumps(values, indent=1))
            for name in (".metadata", commit.VALUES):
                commit.fsync(temporary / name)
                files[name] = commit.digest(temporary / name)
            return commit.commit(temporary, step, files, keep_last)

        return _agreed(finish, channel)[0]

    return Saving(write, background=async_)


def _agreed(action: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's result of `action`; if any rank failed, all raise that `CheckpointError`."""
    result, failure = None, None
    try:
        result = action()
    except CheckpointError as error:
        failure = error
    except Exception as error:  # a full disk, a missing mount
        rank = dist.get_rank() if group is not None else 0
        failure = CheckpointError(
            f"rank {rank} could not write the checkpoint", cause=f"{type(error).__name__}: {error}"
        )
    outcomes = all_gather_object((result, failure), group)
    for _, failed in outcomes:
        if failed is not None:
            raise failed
    return [value for value, _ in outcomes]


def _write(writer: FileSystemWriter, plan: SavePlan, planner: BoxSavePlanner, rank: int):
    """Write this rank's items; returns DCP's results and the size and digest of each file."""
    writer.set_up_storage_writer(is_coordinator=rank == 0)
    prefixed = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    future = writer.write_data(prefixed, planner)
    future.wait()
    results = list(future.value())
    names = {result.storage_data.relative_path for result in results}
    return results, {name: commit.digest(Path(writer.path) / name) for name in sorted(names)}


def _staged(boxes: Mapping[str, BoxedTensor], plan: SavePlan) -> dict[str, BoxedTensor]:
    """Host copies of the boxes this rank writes."""
    mine = {(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items}
    staged = {}
    for name, boxed in boxes.items():
        if not any((name, box.offset) in mine for box, _ in boxed.pieces):
            continue
        pieces = tuple(
            (box, view.detach().to("cpu", copy=True))
            for box, view in boxed.present.pieces
            if (name, box.offset) in mine
        )
        staged[name] = replace(boxed, pieces=pieces, lend=None)
    return staged
