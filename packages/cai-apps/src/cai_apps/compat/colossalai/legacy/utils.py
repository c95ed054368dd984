"""Small verbs of scripts of the first generation."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from cai_apps.booster.loaders import Loading, make_loader
from cai_apps.compat.colossalai.absent import answer
from cai_apps.compat.colossalai.legacy.context import ParallelMode
from cai_apps.compat.colossalai.legacy.core import global_context

__all__ = ["get_dataloader", "is_using_pp"]

__getattr__ = answer("legacy.utils", {"activation_checkpoint": "torch.utils.checkpoint"}, __all__)


def is_using_pp() -> bool:
    """Return whether the config has a pipeline."""
    return global_context.is_using_pp()


def get_dataloader(
    dataset: Dataset,
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **kwargs: Any,
) -> DataLoader:
    """Return a loader whose samples are divided over the data ranks of the config.

    Args:
        dataset: the samples.
        shuffle: whether samples come in another order each epoch.
        seed: the seed of the loader's workers.
        add_sampler: whether ranks have different samples.
        drop_last: whether a last batch that is smaller is left out.
        pin_memory, num_workers, kwargs: as for `DataLoader`.
    """
    ranks = global_context.get_world_size(ParallelMode.DATA) if add_sampler else 1
    rank = global_context.get_local_rank(ParallelMode.DATA) if add_sampler else 0
    size = kwargs.pop("batch_size", 1)
    loading = Loading(size, shuffle, seed, drop_last, pin_memory, num_workers, DistributedSampler)
    return make_loader(dataset, loading, rank=rank, ranks=ranks, **kwargs)
