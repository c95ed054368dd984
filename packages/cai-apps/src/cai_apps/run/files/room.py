"""Room for a run's checkpoints: on the disk, before the first step and each save, and in the host's memory."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cai_mesh import checkpoint
from cai_mesh.errors import ConfigError
from cai_mesh.files import remove
from cai_mesh.layout import BoxedTensor

BESIDE = 2**20
"""Bytes for what stands beside the tensors of a checkpoint."""
SPARE = 0.5
"""The part of free host memory that copies may take."""
CONTAINER = "/sys/fs/cgroup"
"""The place of a container's limits (cgroup v2)."""


def checkpoint_bytes(state: Mapping[str, Any]) -> int:
    """Return the bytes of a checkpoint of a state, of which each rank has a part. Collective."""
    sizes_by_rank: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(sizes_by_rank, {name: _bytes(value) for name, value in state.items()})
    sizes: dict[str, int] = {}
    for rank_sizes in sizes_by_rank:
        sizes |= rank_sizes
    return sum(sizes.values()) + BESIDE


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        value = BoxedTensor.from_param(value)
    return math.prod(value.global_shape) * value.dtype.itemsize if isinstance(value, BoxedTensor) else 0


def has_memory(state: Mapping[str, Any], size: int) -> bool:
    """Whether every host has memory for copies of what its ranks write of a checkpoint of `size` bytes. Collective.

    A host that does not say what it has free has none.
    """
    values = [
        BoxedTensor.from_param(value) if isinstance(value, Tensor) else value for value in state.values()
    ]
    mine = sum(
        box.numel * value.dtype.itemsize
        for value in values
        if isinstance(value, BoxedTensor)
        for box, _ in value.pieces
    )
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    fits_on_hosts = [False] * dist.get_world_size()
    dist.all_gather_object(fits_on_hosts, min(size, ranks * mine) <= SPARE * free_memory())
    return all(fits_on_hosts)


def free_memory() -> int:
    """Return the bytes of host memory that this process may still take, under a limit of its container too."""
    sizes = [
        int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")
    ]
    limit = "".join(_lines(f"{CONTAINER}/memory.max"))
    if limit.isdecimal():
        used = int("".join(_lines(f"{CONTAINER}/memory.current")) or 0)
        cached = [
            line.split()[1]
            for line in _lines(f"{CONTAINER}/memory.stat")
            if line.startswith("inactive_file ")
        ]
        sizes.append(int(limit) - used + sum(map(int, cached)))
    return min(sizes, default=0)


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def check_final(directory: Path, size: int) -> None:
    """Raise ConfigError on every rank where a checkpoint of `size` bytes has no room. Collective."""
    free = [shutil.disk_usage(directory).free if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(free)
    if free[0] < size:
        raise ConfigError(
            f"the disk of {directory} has no room for the checkpoint after the last step",
            got=f"{free[0] / 2**30:,.2f} GiB free",
            expected=f"{size / 2**30:,.2f} GiB for checkpoint.final",
            cause="a checkpoint holds master weights and the optimizer's state; the export comes beside it",
            fix="make room, choose another log.directory, or set checkpoint.final to false",
        )


def make_room(directory: Path, size: int, keep_last: int | None, *, final: bool) -> str:
    """Look for room for a checkpoint on the way, on the first rank; older ones than the newest go where room is short.

    Args:
        directory: the directory of checkpoints.
        size: the bytes of one.
        keep_last: the number that is kept; None: all, and none goes.
        final: whether there is to be room for a last one after it.

    Returns the reason why there is no room; empty: there is some.
    """
    steps = checkpoint.steps(directory)
    replaceable = size if keep_last is not None and steps else 0

    def fits() -> bool:
        free = shutil.disk_usage(directory).free
        return free >= size and free + replaceable >= size * (1 + final)

    for old in [] if keep_last is None else steps[:-1]:
        if fits():
            break
        remove(old.rename(old.with_name(f"{old.name}.deleting")))
    if fits():
        return ""
    free = shutil.disk_usage(directory).free
    return (
        f"{free / 2**30:,.2f} GiB free, a checkpoint is {size / 2**30:,.2f} GiB"
        f"{', and the one after the last step needs room too' if final else ''}"
    )
