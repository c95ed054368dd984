"""Loading: verify together, compare what is asked with what is there, read only the boxes each rank needs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from cai_mesh.checkpoint import commit
from cai_mesh.checkpoint.agree import agreed, control_group, together
from cai_mesh.checkpoint.manifest import (
    MANIFEST,
    STEP,
    VALUES,
    Manifest,
    problems,
    raise_for,
    raise_unless_done,
)
from cai_mesh.checkpoint.planner import BoxLoadPlanner, read_metadata
from cai_mesh.checkpoint.saving import as_boxes
from cai_mesh.comm.collectives import all_gather_object
from cai_mesh.errors import CheckpointError
from cai_mesh.layout.boxed import BoxedTensor
from cai_mesh.layout.boxes import Box
from cai_mesh.layout.writes import note_writes

SHOWN = 8
"""Mismatches listed in an error."""


def newest_good(directory: str | os.PathLike, *, before: Path | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint below `directory` whose files all verify, and what is wrong with newer ones. Collective.

    Args:
        before: a checkpoint there; only older ones are looked at.
    """
    skipped: list[str] = []
    checkpoints = agreed(lambda: commit.steps(directory), control_group(), doing=f"look into {directory}")[0]
    if before is not None:
        checkpoints = checkpoints[: checkpoints.index(before)]
    for checkpoint in reversed(checkpoints):
        wrong = _problems(checkpoint)
        if not wrong:
            return checkpoint, skipped
        skipped += wrong
    return None, skipped


def _problems(checkpoint: Path, *, digests: bool = True) -> list[str]:
    """Return what is wrong with a checkpoint; every rank looks at its part of the files."""
    group = control_group()
    rank, world = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
    rank_problems = all_gather_object(problems(checkpoint, part=rank, parts=world, digests=digests), group)
    return list(dict.fromkeys(line for lines in rank_problems for line in lines))


def load(checkpoint: str | os.PathLike, state: Mapping[str, Any], *, verify: bool = True) -> dict[str, Any]:
    """Fill the tensors of `state` in place from a checkpoint; returns the saved plain values by name. Collective.

    Args:
        checkpoint: a `step-N` directory, or a directory of them (the newest is taken).
        state: as for `save`, on any layout and any number of ranks. Tensors may have another dtype; values are
            converted. Plain values in it are ignored.
        verify: check the digests of the tensors' files first, the ranks sharing them. Without it those files must
            still be there, have their size and be of one save, and the metadata and plain values must be as written.

    Raises `CheckpointError` on every rank when there is no checkpoint, a file is damaged or of another save, or names
    or shapes differ (with a table of the first differences): nothing has been written into `state` then. A file that
    cannot be read after that raises it as well.
    """
    group, doing = control_group(), f"read the checkpoint {checkpoint}"
    path = agreed(lambda: _resolve(Path(checkpoint)), group, doing=doing)[0]
    manifest, metadata, values = together(lambda: _about(path), group, doing=doing)
    if len(set(agreed(lambda: manifest.save, group))) > 1:
        raise CheckpointError(f"{path} was replaced by another save while it was read", fix="load it again")
    raise_for(_problems(path, digests=verify), path)
    boxes, _ = together(lambda: as_boxes(state), group, doing=doing)
    _compare(path, metadata, boxes)
    together(lambda: _fill(path, metadata, boxes), group, doing=doing)
    note_writes()
    return values


def _about(path: Path) -> tuple[Manifest, Metadata, dict[str, Any]]:
    """All of a checkpoint but its tensors' values, each part as the manifest has it."""
    manifest = Manifest.read(path)
    values = json.loads(manifest.bytes_of(path, VALUES))["values"]
    return manifest, read_metadata(path, manifest), values


def _fill(path: Path, metadata: Metadata, boxes: Mapping[str, BoxedTensor]) -> None:
    """Read what this rank's boxes need."""
    reader, planner = FileSystemReader(path), BoxLoadPlanner()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(boxes, metadata)
    reader.read_data(planner.create_local_plan(), planner).wait()


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Args:
        tensors: shape and dtype by name.
        values: plain values by name.
    """

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    values: dict[str, Any]


def contents(checkpoint: str | os.PathLike) -> Contents:
    """Return the contents of a checkpoint, or of a directory's newest, without its tensors' values.

    Raises `CheckpointError` when there is none, or what it says of itself is not as it was written.
    """
    path = _resolve(Path(checkpoint))
    _, metadata, values = _about(path)
    tensors = {
        name: (tuple(saved.size), saved.properties.dtype)
        for name, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }
    return Contents(tensors, values)


def _resolve(path: Path) -> Path:
    if (path / MANIFEST).is_file() or STEP.fullmatch(path.name):
        raise_unless_done(path)
        return path
    newest = commit.latest(path)
    if newest is None:
        raise CheckpointError(f"there is no checkpoint in {path}", expected="directories named step-N")
    return newest


def _compare(path: Path, metadata: Metadata, boxes: Mapping[str, BoxedTensor]) -> None:
    """Raise on every rank when what all ranks together ask for is not what was saved."""
    mine = {name: (boxed.global_shape, _covered(metadata, name, boxed)) for name, boxed in boxes.items()}
    requests: dict[str, tuple[tuple[int, ...], bool]] = {}
    for rank_boxes in all_gather_object(mine, control_group()):
        for name, (shape, covered) in rank_boxes.items():
            requests[name] = (shape, covered and requests.get(name, (shape, True))[1])
    saved = {
        n: tuple(m.size)
        for n, m in metadata.state_dict_metadata.items()
        if isinstance(m, TensorStorageMetadata)
    }
    rows = []
    for name in sorted(requests.keys() | saved.keys()):
        shape, covered = requests.get(name, (None, True))
        if shape != saved.get(name):
            rows.append(f"{name}: this model {shape or 'nothing'}, checkpoint {saved.get(name) or 'nothing'}")
        elif not covered:
            rows.append(f"{name}: the checkpoint holds only a part of it")
    if rows:
        more = [f"... and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
        raise CheckpointError(
            f"checkpoint {path} is of another model: {len(rows)} of "
            f"{len(requests.keys() | saved.keys())} tensors differ",
            got="\n             ".join(rows[:SHOWN] + more),
            fix="load it into the model and optimizer it was saved from",
        )


def _covered(metadata: Metadata, name: str, boxed: BoxedTensor) -> bool:
    saved = metadata.state_dict_metadata.get(name)
    if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != boxed.global_shape:
        return True  # reported as a missing name or another shape
    chunks = [Box(tuple(c.offsets), tuple(c.sizes)) for c in saved.chunks]
    for box, _ in boxed.pieces:
        parts = [part for chunk in chunks if (part := box.intersect(chunk)) is not None]
        if sum(part.numel for part in parts) != math.prod(box.shape):
            return False
    return True
