"""A rank of a launcher that stops making steps: `hanging.py DIRECTORY HOW DEVICE`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.health.watchdog import Watchdog
from cai_apps.run.launch.rank import start_rank


def main() -> None:
    directory, how, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    x = torch.ones(4, device=start_rank(device))
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=pair)  # over NCCL the first one waits for the others in another way
    x.sum().item()
    run = RunDirectory(directory)
    run.crash.mkdir(parents=True, exist_ok=True)
    watchdog = Watchdog(run, 0)
    for step in range(1, 4):
        dist.all_reduce(x)
        watchdog.after_step(step, 0.1)
    if how == "sleeps" and rank == 1:
        time.sleep(600)
    if how == "differs" and rank == 1:
        dist.broadcast(x, src=0)
    if rank < 2:
        dist.all_reduce(x, group=pair)  # rank 2 waits for rank 0 below, which waits for rank 1 here
    dist.all_reduce(x)
    if how == "differs" and rank == 0:
        dist.all_reduce(x)
    x.sum().item()  # where a rank of NCCL waits, which has called all of them
    watchdog.close()


if __name__ == "__main__":
    main()
