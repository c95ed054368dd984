"""Plugins: dataclasses with `to_config()`, from which ranks and data loaders follow."""

from __future__ import annotations

import abc
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from cai_apps.booster.config import BoostConfig, resolved
from cai_apps.booster.launch import need_launch, rank_device
from cai_apps.booster.loaders import Loading, make_loader
from cai_apps.booster.places import Places
from cai_apps.config.validation import mesh_spec
from cai_mesh.comm import ParallelMesh, build_mesh
from cai_mesh.errors import ConfigError, did_you_mean

LOGGER = logging.getLogger("cai_apps.booster")
Class = TypeVar("Class", bound=type)


class Plugin(abc.ABC):
    """The way in which a model is trained: a dataclass of options, and `to_config()`, which says it in cai's terms.

    Sizes and groups of ranks are attributes: `tp_size`, `pp_size`, `sp_size`, `dp_size`, `tp_group`, `pp_group`,
    `dp_group`, `sp_group`, `stage_manager`, `pg_mesh`. They need the ranks to be joined (`launch`).
    """

    no_effect: ClassVar[Mapping[str, str]] = {}
    """Options that are accepted and change nothing, each with the reason."""

    @abc.abstractmethod
    def to_config(self) -> BoostConfig:
        """Return what the options mean in cai's own sections."""

    def __post_init__(self) -> None:
        need_launch(type(self).__name__)
        self.check()
        _ = self.config
        if dist.get_rank() == 0:
            for line in self.notes():
                LOGGER.warning(line)

    def check(self) -> None:  # noqa: B027 (a plugin may have nothing to check)
        """Raise ConfigError for options that nothing here stands for."""

    def notes(self) -> list[str]:
        """Return a line for each option that was given and changes nothing."""
        usual = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        return [
            f"{type(self).__name__}({name}={getattr(self, name)!r}) has no effect: {reason}"
            for name, reason in self.no_effect.items()
            if getattr(self, name) != usual[name]
        ]

    @functools.cached_property
    def config(self) -> BoostConfig:
        """The config for the ranks of this job, checked."""
        need_launch(type(self).__name__)
        return resolved(self.to_config(), dist.get_world_size(), rank_device().type)

    @functools.cached_property
    def mesh(self) -> Any:
        """The mesh of this job's ranks. Collective at first."""
        return build_mesh(mesh_spec(self.config), device_type=rank_device().type)

    @functools.cached_property
    def places(self) -> Places:
        """Sizes and groups of ranks, by the names that loops know."""
        return Places(self.config, ParallelMesh.of(self.mesh))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Places, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.places, name)

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> DataLoader:
        """Return a loader whose samples are divided over data ranks, alike on the other ranks of a data rank.

        Args:
            dataset: the samples.
            batch_size: samples of a batch of one data rank.
            shuffle: whether samples come in another order each epoch.
            seed: the seed of the loader's workers.
            drop_last: whether a last batch that is smaller is left out.
            pin_memory, num_workers: as for `DataLoader`.
            distributed_sampler_cls: a sampler's class; None: `DistributedSampler`.
            kwargs: further arguments of `DataLoader`.
        """
        loading = Loading(
            batch_size, shuffle, seed, drop_last, pin_memory, num_workers, distributed_sampler_cls
        )
        return make_loader(dataset, loading, rank=self.places.dp_rank, ranks=self.places.dp_size, **kwargs)


def plugin(cls: Class) -> Class:
    """Make a frozen dataclass of a plugin's class, which answers an unknown option with the nearest that it knows."""
    kind: Any = dataclass(frozen=True, repr=False)(cls)
    build = kind.__init__
    options = list(inspect.signature(build).parameters)[1:]

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in options:
                raise ConfigError(
                    f"{cls.__name__} has no option {name!r}", got=name, fix=did_you_mean(name, options)
                )
        build(self, *args, **kwargs)

    kind.__init__ = __init__
    return kind
