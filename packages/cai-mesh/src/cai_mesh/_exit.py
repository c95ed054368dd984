"""A pause before the interpreter goes away, for gloo's threads. Imported by whoever starts collectives.

`wait()` returns a moment before gloo's thread drops the finished work, and with it tensors, for which it needs the
interpreter. A program that ends within that moment of its last collective aborts in one run out of ten ("terminate
called without an active exception"; seen with torch 2.13).
"""

from __future__ import annotations

import atexit
import time

import torch.distributed as dist

PAUSE_SECONDS = 0.2


def pause() -> None:
    """Sleep, which gives the interpreter to other threads, where gloo is there to need it."""
    if dist.is_gloo_available():
        time.sleep(PAUSE_SECONDS)


atexit.register(pause)
