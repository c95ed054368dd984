"""Data loaders whose samples are divided over data ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from cai_apps.booster.launch import seed_all


@dataclass(frozen=True)
class Loading:
    """The options of `Plugin.prepare_dataloader`."""

    batch_size: int
    shuffle: bool = False
    seed: int = 1024
    drop_last: bool = False
    pin_memory: bool = False
    num_workers: int = 0
    sampler: Callable[..., Any] | None = None


def make_loader(dataset: Dataset, loading: Loading, *, rank: int, ranks: int, **kwargs: Any) -> DataLoader:
    """Return a loader of this data rank's samples.

    Args:
        dataset: the samples.
        loading: the options.
        rank, ranks: the data rank, and how many there are.
        kwargs: further arguments of `DataLoader`.
    """
    sampler = (loading.sampler or DistributedSampler)(
        dataset, num_replicas=ranks, rank=rank, shuffle=loading.shuffle
    )
    return DataLoader(
        dataset,
        batch_size=loading.batch_size,
        sampler=sampler,
        worker_init_fn=functools.partial(_seed_worker, loading.seed),
        drop_last=loading.drop_last,
        pin_memory=loading.pin_memory,
        num_workers=loading.num_workers,
        **kwargs,
    )


def _seed_worker(seed: int, _worker: int) -> None:
    seed_all(seed)
