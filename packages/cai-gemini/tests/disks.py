"""Disks that misbehave as told, and what a store holds on one."""

from __future__ import annotations

import os
import time

import torch

from cai_gemini.nvme import Syscalls


class Disk(Syscalls):
    """A disk that misbehaves as told: `faults` maps a call to a function of (descriptor, buffers, offset).

    A fault returns the call's answer, raises its error, or returns None: the real disk answers.
    """

    def __init__(self, **faults):
        self.faults = faults

    def _call(self, name, *arguments):
        fault = self.faults.get(name)
        answer = fault(*arguments) if fault else None
        return getattr(Syscalls, name)(self, *arguments) if answer is None else answer

    def open(self, path, flags):
        return self._call("open", path, flags)

    def preadv(self, descriptor, buffers, offset):
        return self._call("preadv", descriptor, buffers, offset)

    def pwritev(self, descriptor, buffers, offset):
        return self._call("pwritev", descriptor, buffers, offset)

    def fallocate(self, descriptor, offset, length):
        return self._call("fallocate", descriptor, offset, length)

    def fsync(self, descriptor):
        return self._call("fsync", descriptor)


def fails(number, times=1 << 30, after=0):
    """A fault that raises errno `number`, `times` times, after `after` good calls."""
    calls = []

    def fault(*_):
        calls.append(1)
        if after < len(calls) <= after + times:
            raise OSError(number, os.strerror(number))

    return fault


def within(region, fault):
    """A fault of requests for one region."""

    def call(descriptor, buffers, offset):
        contents = region._contents
        if contents.position <= offset < contents.position + contents.size:
            return fault(descriptor, buffers, offset)
        return None

    return call


def kept(store, region, numel=None, offset=0):
    """What the store holds, read into fresh memory."""
    out = torch.full((region.numel if numel is None else numel,), 99).to(region.dtype)
    store.read(region, out, offset).wait()
    return out


def open_file(path):
    """Where this process holds the (nameless) file of a store open, or None."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(path):
                return f"/proc/self/fd/{fd}"
        except OSError:
            continue
    return None


def closed(path):
    """Whether the file is let go of, sooner or later."""
    deadline = time.monotonic() + 20
    while open_file(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not open_file(path)
