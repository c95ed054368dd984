"""Saving: plan together, copy or refer, write apart, commit together. Rank 0 holds the lock for the others."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from cai_mesh.checkpoint import commit
from cai_mesh.checkpoint.agree import agreed, control_group, together
from cai_mesh.checkpoint.manifest import METADATA, VALUES, seal, write_values
from cai_mesh.checkpoint.planner import BoxSavePlanner
from cai_mesh.errors import CheckpointError
from cai_mesh.layout.boxed import BoxedTensor

Written = tuple[list[WriteResult], dict[str, tuple[int, str]]]
"""The writes of one rank: where DCP put each item, and size and sha256 of each file."""


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
        keep_last: committed checkpoints to keep, always this one among them; None keeps all.
        async_: copy what this rank writes to host memory, return, and write in a thread. Values changed after the
            call are not seen. Wait for the last `Saving` before the next save, so there is one copy at most; saves
            of one job that overlap all the same are all committed.
        group: gloo group of all ranks for the thread's own coordination; None makes one when `async_` needs it.

    Raises `CheckpointError` on every rank (from `Saving.wait` when async) when another job is saving into the
    directory, the step exists, a value cannot be saved, or a rank failed to write. What was written is removed then,
    and earlier checkpoints are untouched.
    """
    if keep_last is not None and keep_last < 1:
        raise CheckpointError("keep_last must leave at least one checkpoint", got=keep_last)
    control = control_group()
    if async_ and control is not None and group is None:
        group = dist.new_group(backend="gloo")  # type: ignore[assignment]
    rank = dist.get_rank() if control is not None else 0
    boxes, values = together(lambda: as_boxes(state), control)
    planner = BoxSavePlanner()
    planner.set_up_planner(boxes)
    draft, plans, metadata = _planned(planner, Path(directory).absolute(), step, control)
    if async_:
        together(lambda: planner.set_up_planner(_staged(boxes, plans[rank])), control)
    try:
        nbytes = sum(item.tensor_storage_size() or 0 for plan in plans for item in plan.items)
        agreed(lambda: draft.begin(nbytes) if rank == 0 else None, control)
    except BaseException:
        draft.close()
        raise

    def write() -> Path:
        channel = group if async_ else control
        try:
            written = agreed(lambda: _write(draft, plans[rank], planner, rank), channel)
            finish = lambda: _finish(draft, written, metadata, values, keep_last)  # noqa: E731
            return agreed(lambda: finish() if rank == 0 else None, channel)[0]
        finally:
            draft.close()

    return Saving(write, background=async_)


def _planned(
    planner: BoxSavePlanner, directory: Path, step: int, control: dist.ProcessGroup | None
) -> tuple[commit.Draft, list[SavePlan], Metadata]:
    """Names, id and plan of a save, the same on all ranks. Raises `CheckpointError` when ranks save other steps."""
    ranks = agreed(
        lambda: (commit.Draft(directory, step, uuid.uuid4().hex), planner.create_local_plan()), control
    )
    step_numbers = [draft.step for draft, _ in ranks]
    if len(set(step_numbers)) > 1:
        raise CheckpointError(
            "the ranks are not saving the same step",
            got=f"steps {step_numbers} of ranks 0 to {len(step_numbers) - 1}",
            fix="save at the same point of the run on all ranks",
        )
    return ranks[0][0], *planner.create_global_plan([plan for _, plan in ranks])


def _write(draft: commit.Draft, plan: SavePlan, planner: BoxSavePlanner, rank: int) -> Written:
    """Write this rank's items, each file sealed with the save's id."""
    writer = _writer(draft)
    writer.set_up_storage_writer(is_coordinator=rank == 0)
    prefixed = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    future = writer.write_data(prefixed, planner)
    future.wait()
    results = list(future.value())
    names = {result.storage_data.relative_path for result in results}
    return results, {name: seal(draft.temporary / name, draft.save) for name in sorted(names)}


def _finish(
    draft: commit.Draft,
    written: list[Written],
    metadata: Metadata,
    values: Mapping[str, Any],
    keep_last: int | None,
) -> Path:
    """Write what is said of all ranks' files, and commit them; returns the checkpoint."""
    _writer(draft).finish(metadata, [results for results, _ in written])
    files = {name: entry for _, entries in written for name, entry in entries.items()}
    files[METADATA] = seal(draft.temporary / METADATA, draft.save)
    files[VALUES] = write_values(draft.temporary / VALUES, values, draft.save)
    return draft.commit(files, keep_last)


def _writer(draft: commit.Draft) -> FileSystemWriter:
    """DCP's writer into a draft. It need not force files to disk: sealing them does."""
    writer = FileSystemWriter(draft.temporary, sync_files=False, per_thread_copy_ahead=0)
    writer.save_id = draft.save
    return writer


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
