"""Turns a process into a rank: its device and its group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def local_rank() -> int:
    """This rank's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def start_rank(device_type: str) -> torch.device:
    """Joins the ranks of the environment, or makes a world of one; returns the rank's device."""
    device = torch.device("cuda", local_rank()) if device_type == "cuda" else torch.device("cpu")
    backend = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if device_type == "cuda" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device
