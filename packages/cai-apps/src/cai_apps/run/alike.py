"""Errors that all ranks of a launcher find alike are said once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cai_apps.run.launch import GRACE_SECONDS, USER_ERROR
from cai_mesh.errors import CaiError


@contextmanager
def said_by_first_rank() -> Iterator[None]:
    """For errors that every rank finds alike: the other ranks leave in silence, after rank 0 has had time to speak."""
    try:
        yield
    except CaiError:
        rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        numbers = all(text.isdigit() and len(text) < 10 for text in (rank, world))
        if not (numbers and 0 < int(rank) < int(world)):
            raise
        time.sleep(GRACE_SECONDS)
        sys.exit(USER_ERROR)
