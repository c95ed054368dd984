"""The pulse of a rank: a thread that says to the server that the process lives, and how long its step has lasted."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BEAT_SECONDS = 0.5
"""Seconds from one beat to the next."""


@dataclass
class Marks:
    """The steps of a rank as its pulse sees them.

    Args:
        count: steps that were begun and steps that were ended, together; odd in the midst of one.
    """

    count: int = 0


def start_pulse(connection: Connection, marks: Marks) -> None:
    """Start the thread. The process ends with the server, also where a step never ends.

    The seconds for which the same step has lasted are said, counted in beats: a process that was stopped and goes on,
    as a terminal's job does, has not been stuck.
    """
    threading.Thread(target=_beat, args=(connection, marks), name="pulse", daemon=True).start()


def _beat(connection: Connection, marks: Marks) -> None:
    count, beats = 0, 0
    while True:
        is_same = marks.count == count and count % 2
        count, beats = marks.count, beats + 1 if is_same else 0
        try:
            connection.send(beats * BEAT_SECONDS)
        except OSError:  # the server is gone
            os._exit(0)
        time.sleep(BEAT_SECONDS)
