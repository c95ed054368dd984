"""Page-locked memory, with a CUDA runtime that only takes notes."""

from __future__ import annotations

import ctypes
import gc
import mmap

import pytest
import torch

from cai_gemini.memory import pinned
from cai_gemini.memory.copies import Copied, Copies, Scalar

CUDA = torch.device("cuda", 0)


class Runtime:
    """Registers pages once each, as CUDA does."""

    def __init__(self, refuses: bool = False):
        self.refuses, self.ranges, self.seen = refuses, {}, []

    def cudaHostRegister(self, address, size, flags):
        pages = range(address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE))
        taken = {page for held in self.ranges.values() for page in held}
        if self.refuses or taken.intersection(pages):
            return 712
        self.ranges[address] = pages
        return 0

    def cudaHostUnregister(self, address):
        self.seen.append(ctypes.string_at(address, 3))  # it must be there still
        del self.ranges[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


def test_no_two_share_a_page(runtime):
    sizes = [pinned.SMALL + 100 * i + 1 for i in range(40)]
    held = [pinned.host_memory(n, torch.uint8, CUDA) for n in sizes]
    assert [t.numel() for t in held] == sizes
    assert len(runtime.ranges) == 40
    assert all(t.data_ptr() % mmap.PAGESIZE == 0 for t in held)
    assert not any(t.any() for t in held)


def test_unregistered_while_it_is_there(runtime):
    memory = pinned.host_memory(pinned.SMALL, torch.bfloat16, CUDA)
    view = memory[5:].view(torch.uint8)
    memory.view(torch.uint8)[:3] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    del memory
    gc.collect()
    assert len(runtime.ranges) == 1, "a view holds it"
    del view
    gc.collect()
    assert not runtime.ranges and runtime.seen == [b"\x07\x08\x09"]


def test_a_refusal_is_not_the_next_kernels_error(runtime, monkeypatch):
    runtime.refuses, launched = True, []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **k: (pin_memory, empty(*a, **k)))
    monkeypatch.setattr(pinned, "_forget_error", launched.append)
    pin, memory = pinned.host_memory(pinned.SMALL, torch.uint8, CUDA)
    assert pin and memory.numel() == pinned.SMALL and launched == [CUDA]


def test_a_pool_keeps_kinds_apart(runtime):
    pool = pinned.HostPool(CUDA)
    one, other = (pool.take(2**20, torch.float32, copies=copies) for copies in (True, False))
    assert list(runtime.ranges) == [one.data_ptr()]
    pool.give(one)
    pool.give(other)
    pool.give(torch.zeros(2**20))  # not of the pool
    assert pool.take(2**20, torch.float32, copies=False) is other
    assert pool.take(2**20, torch.float32) is one
    assert pool.take(2**20, torch.float32) is not one


class Waited(Copied):
    waits = 0

    def synchronize(self):
        self.waits += 1


def test_a_scalar_waits_for_its_copy_alone():
    copied = Waited(None)
    scalar = Scalar(torch.tensor(3.0), torch.tensor([2.0]), copied)
    assert (float(scalar), copied.waits, float(scalar.device_value)) == (2.0, 1, 3.0)
    copies = Copies(torch.device("cpu"))
    assert copies.scalar(0.5) == 0.5
    assert float(copies.scalar(torch.tensor(0.25, dtype=torch.float64))) == 0.25


class OffloadedChunk:
    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


def test_the_allocator_is_told_of_a_copy_that_nobody_waited_for():
    kept, left = OffloadedChunk(), OffloadedChunk()
    waited, dropped = Copied(None, "stream", [kept]), Copied(None, "stream", [left])
    waited.wait()
    del waited, dropped
    assert (kept.streams, left.streams) == ([], ["stream"])
