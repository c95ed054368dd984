"""The ways to join the ranks of a job."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch.distributed as dist

from cai_apps.booster import launch as join
from cai_mesh.errors import ConfigError

__all__ = ["launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"]


def launch_from_torch(
    backend: Any = "nccl", seed: int = 1024, verbose: bool = True, config: Any = None
) -> None:
    """Join the ranks that torchrun has started, and seed random numbers alike.

    Args:
        backend: "nccl", where there are GPUs, and "gloo" for the CPU; without GPUs ranks talk by gloo.
        seed: the seed of Python, numpy and torch.
        verbose: unused.
        config: a config of the first generation, for `colossalai.initialize(...)`, which had it in the first place.
    """
    if backend not in ("nccl", "gloo", "hccl"):
        backend, config = "nccl", backend
    join(seed=seed, device="cpu" if backend == "gloo" else "auto")
    _keep(config)


def _keep(config: Any) -> None:
    """Keep a config of the first generation for its `initialize`."""
    if config is not None:
        from cai_apps.compat.colossalai.legacy.launching import take_config

        take_config(config)


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Join the ranks of a job that meet at a host's port.

    Args:
        rank, world_size: this rank, and how many there are.
        host, port: the address at which the first rank listens.
        backend: as for `launch_from_torch`.
        local_rank: this rank's number on its host; None: that of LOCAL_RANK, or `rank`.
        seed: the seed of Python, numpy and torch.
        verbose: unused.
    """
    os.environ["LOCAL_RANK"] = str(os.environ.get("LOCAL_RANK", rank) if local_rank is None else local_rank)
    store = dist.TCPStore(host, port, world_size, rank == 0)
    device = "cpu" if backend == "gloo" else "auto"
    join(seed=seed, device=device, store=store, rank=rank, world_size=world_size)


def launch_from_slurm(
    host: str, port: int, backend: str = "nccl", seed: int = 1024, verbose: bool = True
) -> None:
    """Join the ranks that srun has started; the arguments are those of `launch`."""
    rank, world_size = _numbers("SLURM_PROCID", "SLURM_NPROCS", "srun")
    launch(rank, world_size, host, port, backend, int(os.environ.get("SLURM_LOCALID", rank)), seed, verbose)


def launch_from_openmpi(
    host: str, port: int, backend: str = "nccl", seed: int = 1024, verbose: bool = True
) -> None:
    """Join the ranks that mpirun has started; the arguments are those of `launch`."""
    rank, world_size = _numbers("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun")
    local = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", rank))
    launch(rank, world_size, host, port, backend, local, seed, verbose)


def _numbers(rank: str, world_size: str, launcher: str) -> tuple[int, int]:
    missing = [name for name in (rank, world_size) if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{launcher} has not started this process",
            got=f"no {', '.join(missing)}",
            fix=f"start the script with {launcher}, or call launch_from_torch() under torchrun",
        )
    return int(os.environ[rank]), int(os.environ[world_size])


class _Callable(ModuleType):
    """This module, which was a function in the first generation: `colossalai.initialize(model, optimizer, ...)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from cai_apps.compat.colossalai.legacy.engine import initialize

        return initialize(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
