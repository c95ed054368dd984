"""Turns a process into a rank: its device and its group."""

from __future__ import annotations

import io
import os
import sys

import torch
import torch.distributed as dist

from cai_apps.config.environment import check_address
from cai_mesh.errors import MeshError


def local_rank() -> int:
    """This rank's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def start_rank(device_type: str) -> torch.device:
    """Joins the ranks of the environment, or makes a world of one; returns the rank's device.

    From here on each line that the rank prints is written whole: ranks of a machine share its output.

    Raises:
        MeshError: the ranks cannot meet at MASTER_ADDR and MASTER_PORT.
    """
    _write_whole_lines()
    device = torch.device("cuda", local_rank()) if device_type == "cuda" else torch.device("cpu")
    backend = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        _join(backend, device if device_type == "cuda" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def _write_whole_lines() -> None:
    """Python writes a line and its end apart where PYTHONUNBUFFERED is set, and another rank's line comes between."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _join(backend: str, device: torch.device | None) -> None:
    """Meet the other ranks. Raises MeshError where that cannot be."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    check_address("MASTER_ADDR", address)
    try:
        dist.init_process_group(backend, device_id=device)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        text = str(error)
        busy = "EADDRINUSE" in text or "in use" in text
        raise MeshError(
            f"port {port} of {address} is taken by another program"
            if busy
            else f"the ranks cannot meet at {address}, port {port}",
            got=f"MASTER_ADDR={address} MASTER_PORT={port}",
            cause="often another job of this machine, or what is left of an earlier one"
            if busy
            else text.splitlines()[0][:300],
            fix="set MASTER_PORT to a free port, the same for all ranks"
            if busy
            else "see whether rank 0 runs there, and whether the network lets this machine reach it",
        ) from None
