"""Joins the ranks of a job: those that a launcher started, or one that is alone, as in a notebook."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import torch.distributed as dist

from cai_mesh.errors import ConfigError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of the environment by which torch's launcher tells a rank of the others."""


def launch(
    *,
    seed: int = 1024,
    device: str = "auto",
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> torch.device:
    """Join the ranks of a job, choose this rank's device and seed random numbers alike on all ranks.

    Under `torchrun` (or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) it joins those ranks;
    in a plain process or a notebook it is a job of one rank. Ranks that have been joined stay as they are.

    Args:
        seed: the seed of Python, numpy and torch.
        device: "auto": a GPU where torch sees one for each rank of this host, else the CPU; "cpu"; or "cuda".
        store: the store by which ranks meet; None: the variables of the environment say where.
        rank, world_size: this rank's number and the number of ranks, beside a store.

    Returns the device.

    Raises:
        ConfigError: only some of the variables are set, or there is no such device.
    """
    chosen = _device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        _join(chosen, store, rank, world_size)
    seed_all(seed)
    return chosen


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def need_launch(what: str) -> None:
    """Raise ConfigError where the ranks of the job have not been joined.

    Args:
        what: the name of what needs them, as the user calls it.
    """
    if not dist.is_initialized():
        raise ConfigError(
            f"{what} was used before the ranks were joined",
            got="no process group",
            fix="call launch() of cai_apps.booster first (launch_from_torch() of colossalai)",
        )


def rank_device() -> torch.device:
    """Return the device that this rank computes on: the current GPU where the ranks have GPUs, else the CPU."""
    if torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in str(dist.get_backend_config())):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _join(device: torch.device, store: dist.Store | None, rank: int | None, world_size: int | None) -> None:
    backend, place = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    if store is not None:
        numbers = {"rank": rank or 0, "world_size": world_size or 1}
        dist.init_process_group(backend, store=store, device_id=place, **numbers)
        return
    present = [name for name in NEEDED if name in os.environ]
    if not present:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            "the launcher has told only a part of what a rank must know",
            got=f"{', '.join(present)}, but no {', '.join(missing)}",
            fix="start the script with torchrun, or unset these variables for a single process",
        )
    dist.init_process_group(backend, device_id=place)


def _device(device: str) -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", 0))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    if device == "cuda" and not enough:
        raise ConfigError(
            "there is no GPU for each rank of this host",
            got=f"{torch.cuda.device_count()} GPUs, {ranks_here} ranks",
            fix='start fewer ranks, or launch(device="cpu")',
        )
    if device == "cuda" or (device == "auto" and enough):
        return torch.device("cuda", local)
    return torch.device("cpu")
