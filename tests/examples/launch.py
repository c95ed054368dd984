"""Processes with the environment that torchrun gives its ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def launched(words: list[str], ranks: int) -> str:
    """What rank 0 of a script prints; one rank is started without torchrun's environment."""
    shared = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if ranks > 1:
        shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        shared |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}
        shared |= {"TORCHELASTIC_RUN_ID": "examples"}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {} for rank in range(ranks)]
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | shared | each,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in own
    ]
    try:
        results = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, results, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return results[0][0]
