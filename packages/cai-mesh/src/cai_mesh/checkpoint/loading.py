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
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from cai_mesh.checkpoint import commit
from cai_mesh.checkpoint.planner import BoxLoadPlanner, SafeReader, read_metadata
from cai_mesh.checkpoint.saving import as_boxes, control_group
from cai_mesh.comm.collectives import all_gather_object
from cai_mesh.errors import CheckpointError
from cai_mesh.layout.boxed import BoxedTensor
from cai_mesh.layout.boxes import Box

SHOWN = 8
"""Mismatches listed in an error."""


def newest_good(directory: str | os.PathLike) -> tuple[Path | None, list[str]]:
    """The newest checkpoint below `directory` whose files all verify, and what is wrong with newer ones. Collective."""
    skipped: list[str] = []
    for checkpoint in reversed(commit.steps(directory)):
        found = _problems(checkpoint)
        if not found:
            return checkpoint, skipped
        skipped += found
    return None, skipped


def _problems(checkpoint: Path) -> list[str]:
    """Every rank verifies its part of the files."""
    group = control_group()
    rank, world = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
    found = all_gather_object(commit.problems(checkpoint, part=rank, parts=world), group)
    return list(dict.fromkeys(line for lines in found for line in lines))


def load(checkpoint: str | os.PathLike, state: Mapping[str, Any], *, verify: bool = True) -> dict[str, Any]:
    """Fill the tensors of `state` in place from a checkpoint; returns the saved plain values by name. Collective.

    Args:
        checkpoint: a `step-N` directory, or a directory of them (the newest is taken).
        state: as for `save`, on any layout and any number of ranks. Tensors may have another dtype; values are
            converted. Plain values in it are ignored.
        verify: check sizes and digests first, the ranks sharing the files.

    Raises `CheckpointError` when there is no checkpoint, a file is damaged, or names or shapes differ (with a table
    of the first differences); nothing has been written into `state` then.
    """
    path = _resolve(Path(checkpoint))
    if verify:
        commit.raise_for(_problems(path), path)
    metadata = read_metadata(path)
    boxes, _ = as_boxes(state)
    _compare(path, metadata, boxes)
    reader, planner = SafeReader(path), BoxLoadPlanner()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(boxes, metadata)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return json.loads((path / commit.VALUES).read_text())


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Args:
        tensors: shape and dtype by name.
        values: plain values by name.
    """

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    values: dict[str, Any]


def contents(checkpoint: str | os.PathLike) -> Contents:
    """What a checkpoint, or the newest of a directory, holds, without its tensors' values.

    Raises `CheckpointError` when there is none or its metadata is damaged.
    """
    path = _resolve(Path(checkpoint))
    found = read_metadata(path).state_dict_metadata
    tensors = {
        name: (tuple(saved.size), saved.properties.dtype)
        for name, saved in found.items()
        if isinstance(saved, TensorStorageMetadata)
    }
    return Contents(tensors, json.loads((path / commit.VALUES).read_text()))


def _resolve(path: Path) -> Path:
    if (path / commit.MANIFEST).is_file() or commit._STEP.fullmatch(path.name):
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint {path}")
        return path
    newest = commit.latest(path)
    if newest is None:
        raise CheckpointError(f"there is no checkpoint in {path}", expected="directories named step-N")
    return newest


def _compare(path: Path, metadata: Metadata, boxes: Mapping[str, BoxedTensor]) -> None:
    """Raise on every rank when what all ranks together ask for is not what was saved."""
    mine = {name: (boxed.global_shape, _covered(metadata, name, boxed)) for name, boxed in boxes.items()}
    asked: dict[str, tuple[tuple[int, ...], bool]] = {}
    for held in all_gather_object(mine, control_group()):
        for name, (shape, covered) in held.items():
            asked[name] = (shape, covered and asked.get(name, (shape, True))[1])
    saved = {
        n: tuple(m.size)
        for n, m in metadata.state_dict_metadata.items()
        if isinstance(m, TensorStorageMetadata)
    }
    rows = []
    for name in sorted(asked.keys() | saved.keys()):
        shape, covered = asked.get(name, (None, True))
        if shape != saved.get(name):
            rows.append(f"{name}: this model {shape or 'nothing'}, checkpoint {saved.get(name) or 'nothing'}")
        elif not covered:
            rows.append(f"{name}: the checkpoint holds only a part of it")
    if rows:
        more = [f"... and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
        raise CheckpointError(
            f"checkpoint {path} is of another model: {len(rows)} of {len(asked.keys() | saved.keys())} tensors differ",
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
