"""Threads that do host work: how many, and that they leave the process's own settings alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from cai_gemini.memory.worker import Worker, host_threads, leave_cores


@pytest.fixture
def cores(monkeypatch):
    def have(count: int, processes: int | None = None) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
        monkeypatch.setattr(torch, "get_num_threads", lambda: count)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if processes is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))

    return have


@pytest.mark.parametrize(
    ("count", "processes", "threads"),
    [(16, None, 14), (16, 1, 14), (64, 4, 14), (4, None, 2), (2, None, 1), (1, None, 1), (4, 8, 1)],
)
def test_two_cores_of_a_process_are_left_to_those_that_drive_its_gpu(cores, count, processes, threads):
    cores(count, processes)
    assert host_threads() == threads


def test_threads_that_were_asked_for_are_no_more(cores, monkeypatch):
    cores(16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    assert host_threads() == 6


def test_a_launcher_s_single_thread_is_not_taken_for_a_wish(cores, monkeypatch):
    cores(32, 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # torchrun's OMP_NUM_THREADS
    assert host_threads() == 14


def test_the_process_s_threads_stay_what_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        leave_cores()
        assert torch.get_num_threads() == 3
        worker = Worker("test", torch.device("cpu"))
        assert torch.get_num_threads() == 3
        worker.close()
    finally:
        torch.set_num_threads(before)


def test_a_process_that_ends_waits_for_what_was_submitted():
    program = """
import torch
from cai_gemini.memory.worker import Worker

def job():
    found = torch.zeros(2**20)
    for _ in range(500):
        found.add_(1)
    print(found.sum().item(), flush=True)

worker = Worker("test", torch.device("cpu"))
worker.submit(job)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, str(500.0 * 2**20)), done.stderr
