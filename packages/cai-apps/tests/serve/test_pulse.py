"""What a server makes of the pulses of a model's ranks: death, silence, and a step that does not end."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from pathlib import Path

import pytest

from cai_apps.serve import processes, pulse
from cai_apps.serve.rank import WorkerOptions


class Process:
    """A process that is only looked at."""

    exitcode = -9

    def __init__(self):
        self.is_killed = False

    def kill(self):
        self.is_killed = True

    def join(self, seconds):
        pass


@pytest.fixture
def watched(monkeypatch):
    """Two ranks whose pulses are ours: the other ends of these, and where reasons come."""
    monkeypatch.setattr(processes, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(processes, "SILENT_SECONDS", 0.5)
    ranks = processes.Processes(WorkerOptions(Path(), tensor=2), step_seconds=60)
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    ranks._pulses, ranks._processes = [ours for ours, _ in pipes], [Process(), Process()]
    ranks._connection = None
    reasons: queue.Queue[str] = queue.Queue()
    threading.Thread(target=ranks._watch, args=(reasons.put,), daemon=True).start()
    yield ranks, [other for _, other in pipes], reasons
    ranks._ended.set()


def beat(others, seconds: float, said=(0.0, 0.0)):
    for _ in range(int(seconds / 0.05)):
        for other, number in zip(others, said, strict=False):
            other.send(number)
        time.sleep(0.05)


def test_ranks_that_say_something_go_on_and_one_that_is_silent_ends_all(watched):
    ranks, others, reasons = watched
    beat(others, 1.2, said=(59.5, 0.0))
    assert reasons.empty()
    beat(others[:1], 1.2)
    assert reasons.get(timeout=5) == "rank 1 of 2 of a model is stuck: it says nothing"
    assert all(process.is_killed for process in ranks._processes) and reasons.empty()


def test_a_step_that_does_not_end_ends_all(watched):
    ranks, others, reasons = watched
    beat(others, 0.1, said=(0.5, 60.5))
    assert reasons.get(timeout=5) == "rank 1 of 2 of a model has computed a step for 60.5 seconds"
    assert all(process.is_killed for process in ranks._processes)


def test_the_end_of_a_pipe_is_a_death(watched):
    _, others, reasons = watched
    others[1].close()
    assert reasons.get(timeout=5) == "rank 1 of 2 of a model died with exit code -9"


class Gone(BaseException):
    """The end of a process that is only acted."""


def test_a_pulse_counts_the_beats_of_one_step_and_ends_with_the_server(monkeypatch):
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.001)
    marks, said = pulse.Marks(), []

    class Server:
        def send(self, seconds):
            said.append(round(seconds * 1000))
            marks.count = {3: 1, 7: 3, 9: 4}.get(len(said), marks.count)
            if len(said) == 11:
                raise BrokenPipeError

    def leave(code):
        raise Gone(code)

    monkeypatch.setattr(pulse.os, "_exit", leave)
    with pytest.raises(Gone):
        pulse._beat(Server(), marks)
    assert said == [0, 0, 0, 0, 1, 2, 3, 0, 1, 0, 0]
