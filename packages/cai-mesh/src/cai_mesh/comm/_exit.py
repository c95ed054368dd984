"""A pause before the interpreter goes away, for gloo's threads.

`wait()` returns a moment before gloo's thread drops the finished work, and with it tensors, for which it needs the
interpreter. A program that ends within that moment of its last collective aborts in one run out of ten ("terminate
called without an active exception"; seen with torch 2.13).
"""

from __future__ import annotations

import atexit
import functools
import time

import torch

PAUSE_SECONDS = 0.2


@functools.cache
def pause_at_exit() -> None:
    """Let this process sleep a moment before it ends, which gives the interpreter to other threads."""
    atexit.register(time.sleep, PAUSE_SECONDS)


def ran_on(device: torch.device) -> None:
    """Called by whoever starts a collective: those of CPU tensors are gloo's."""
    if device.type == "cpu" and not torch.compiler.is_compiling():
        pause_at_exit()
