"""Errors that every rank of a launcher meets, said by one of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cai_apps.run.exit_codes import GRACE_SECONDS, USER_ERROR
from cai_mesh.errors import CaiError


@contextmanager
def said_by_first_rank() -> Iterator[None]:
    """Lets rank 0 alone raise what every rank meets: the others exit in silence, after it has had time to speak."""
    try:
        yield
    except CaiError:
        rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        numbers = all(text.isdigit() and len(text) < 10 for text in (rank, world))
        if not (numbers and 0 < int(rank) < int(world)):
            raise
        time.sleep(GRACE_SECONDS)
        sys.exit(USER_ERROR)
