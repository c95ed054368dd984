"""A disk that is missing, full, slow, failing or lying: the right error, and never a stale value."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import random
import re
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from disks import Disk, closed, fails, kept, open_file
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_gemini.nvme import NvmeError, NvmeStore, Syscalls

BLOCK = 8192
NUMEL = 3 * BLOCK // 4 + 500  # three blocks and a part


def opened(tmp_path, disk, **options):
    return NvmeStore(tmp_path, block_bytes=BLOCK, threads=3, syscalls=disk, **options)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EREMOTEIO])
def test_a_failed_write_is_named_and_nothing_stale_is_read(tmp_path, number):
    disk = Disk()
    with opened(tmp_path, disk) as store:
        region = store.reserve("layers.7.mlp.weight", NUMEL, torch.float32)
        other = store.reserve("other", NUMEL, torch.float32)
        for each in (region, other):
            store.write(each, torch.ones(NUMEL)).wait()
        disk.faults["pwritev"] = fails(number, times=1, after=1)
        handle = store.write(region, torch.full((NUMEL,), 2.0))
        with pytest.raises(NvmeError) as caught:
            handle.wait()
        message = str(caught.value)
        for part in (
            "layers.7.mlp.weight",
            store.path,
            "file offset",
            errno.errorcode[number],
            os.strerror(number),
            "cause:",
            "fix:",
        ):
            assert part in message
        for _ in range(2):
            with pytest.raises(NvmeError, match="holds nothing that may be used"):
                kept(store, region)
        with pytest.raises(NvmeError, match="holds nothing that may be used"):
            store.write(region, torch.ones(10), 5).wait()
        assert torch.equal(kept(store, other), torch.ones(NUMEL))
        store.write(region, torch.full((NUMEL,), 3.0)).wait()
        assert torch.equal(kept(store, region), torch.full((NUMEL,), 3.0))


def test_a_read_that_follows_a_failing_write_fails(tmp_path):
    disk = Disk()
    with opened(tmp_path, disk) as store:
        region = store.reserve("p", NUMEL, torch.float32)
        store.write(region, torch.ones(NUMEL)).wait()
        disk.faults["pwritev"] = lambda *_: time.sleep(0.05) or fails(errno.EIO)()
        store.write(region, torch.zeros(NUMEL))
        reads = [store.read(region, torch.empty(NUMEL)) for _ in range(3)]
        for read in reads:
            with pytest.raises(NvmeError, match=re.escape("p in ") + ".*holds nothing"):
                read.wait()


def test_a_failed_read_is_an_error_and_loses_nothing(tmp_path):
    disk = Disk()
    with opened(tmp_path, disk) as store:
        region = store.reserve("p", NUMEL, torch.float32)
        store.write(region, torch.ones(NUMEL)).wait()
        disk.faults["preadv"] = fails(errno.EIO, times=1, after=2)
        with pytest.raises(NvmeError, match=r"read of p, bytes 0 to .* failed(?s:.*)EIO"):
            kept(store, region)
        assert torch.equal(kept(store, region), torch.ones(NUMEL))
        disk.faults["preadv"] = fails(errno.EIO)
        with pytest.raises(NvmeError, match="EIO"):
            store.write(region, torch.zeros(10), 5).wait()
        disk.faults.clear()
        with pytest.raises(NvmeError, match="holds nothing that may be used"):
            kept(store, region)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_short_and_interrupted_requests_are_continued(tmp_path, direct, aligned):
    chance = random.Random(0)

    def short(call):
        def fault(descriptor, buffers, offset):
            kind = chance.random()
            if kind < 0.2:
                raise InterruptedError
            if kind < 0.4:
                raise BlockingIOError
            room = sum(len(view) for view in buffers)
            if kind < 0.5 and not direct:
                return call(descriptor, [buffers[0][: chance.randrange(1, len(buffers[0]) + 1)]], offset)
            if kind < 0.5:
                return chance.randrange(4096) if room > 8192 and direct and call is os.preadv else None
            return call(descriptor, [buffers[0][:4096]], offset) if len(buffers[0]) >= 4096 else None

        return fault

    disk = Disk()
    with NvmeStore(tmp_path, block_bytes=4 * BLOCK, threads=3, syscalls=disk, direct=direct) as store:
        disk.faults.update(preadv=short(os.preadv), pwritev=short(os.pwritev))
        numel = 9 * BLOCK + 13
        region = store.reserve("p", numel, torch.float32)
        sent = store.buffer(numel, torch.float32) if aligned else torch.empty(numel + 1)[1:]
        for _ in range(5):
            store.write(region, sent.normal_()).wait()
            assert torch.equal(kept(store, region), sent)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_request_without_progress_ends(tmp_path, call):
    disk = Disk()
    with opened(tmp_path, disk) as store:
        region = store.reserve("p", NUMEL, torch.float32)
        store.write(region, torch.ones(NUMEL)).wait()
        disk.faults[call] = lambda *_: 0
        with pytest.raises(NvmeError, match=r"ended after 0 of \d+ bytes"):
            (kept(store, region) if call == "preadv" else store.write(region, torch.ones(NUMEL)).wait())
        assert len(disk.faults) == 1


def test_a_disk_that_is_busy_too_long_is_an_error(tmp_path):
    disk = Disk()
    with opened(tmp_path, disk, timeout=0.3) as store:
        region = store.reserve("p", 10, torch.float32)
        disk.faults["pwritev"] = fails(errno.EAGAIN)
        handle = store.write(region, torch.ones(10))
        with pytest.raises(NvmeError, match="EAGAIN"):
            handle.wait(timeout=20)


def test_a_file_cut_short_is_an_error(tmp_path):
    with opened(tmp_path, Disk(), checksums=False) as store:
        region = store.reserve("p", NUMEL, torch.float32)
        store.write(region, torch.ones(NUMEL)).wait()
        os.truncate(open_file(store.path), BLOCK)
        with pytest.raises(NvmeError, match="ended after 0 of"):
            kept(store, region)


@pytest.mark.parametrize("byte", [0, BLOCK - 1, 2 * BLOCK + 5, 4 * NUMEL - 1])
def test_a_flipped_bit_on_the_disk_is_found(tmp_path, byte):
    with opened(tmp_path, Disk()) as store:
        region = store.reserve("layers.0.bias", NUMEL, torch.float32)
        store.write(region, torch.randn(NUMEL)).wait()
        with open(open_file(store.path), "r+b") as file:
            file.seek(byte)
            flipped = bytes([file.read(1)[0] ^ 16])
            file.seek(byte)
            file.write(flipped)
        words = (
            rf"block {byte // BLOCK} of layers\.0\.bias in {re.escape(store.path)} is not what was written"
        )
        with pytest.raises(NvmeError, match=words):
            kept(store, region)
        part = torch.empty(1)
        with pytest.raises(NvmeError, match=words):
            store.read(region, part, byte // 4).wait()
        with pytest.raises(NvmeError, match=words):
            store.write(region, part, byte // 4).wait()


def test_a_flipped_bit_on_the_way_is_found(tmp_path):
    def flip(descriptor, buffers, offset):
        moved = os.preadv(descriptor, buffers, offset)
        buffers[0][7] ^= 1
        return moved

    disk = Disk()
    for checksums in (True, False):
        with opened(tmp_path, disk, checksums=checksums) as store:
            region = store.reserve("p", 100, torch.float32)
            store.write(region, torch.ones(100)).wait()
            disk.faults["preadv"] = flip
            if checksums:
                with pytest.raises(NvmeError, match="block 0 of p"):
                    kept(store, region)
            else:
                assert not torch.equal(kept(store, region), torch.ones(100))
            disk.faults.clear()


def test_a_lost_write_is_found(tmp_path):
    """The disk says that it wrote and did not: what it returns later is old."""
    disk = Disk()
    with opened(tmp_path, disk) as store:
        region = store.reserve("p", NUMEL, torch.float32)
        store.write(region, torch.ones(NUMEL)).wait()
        disk.faults["pwritev"] = lambda _, buffers, offset: (
            sum(map(len, buffers)) if offset == BLOCK else None
        )
        store.write(region, torch.zeros(NUMEL)).wait()
        with pytest.raises(NvmeError, match="block 1 of p"):
            kept(store, region)


def test_the_page_cache_without_checksums_hears_of_late_errors(tmp_path):
    disk = Disk(fsync=fails(errno.EIO))
    with opened(tmp_path, disk, direct=False, checksums=False) as store:
        region = store.reserve("p", 100, torch.float32)
        with pytest.raises(NvmeError, match="EIO"):
            store.write(region, torch.ones(100)).wait()
        with pytest.raises(NvmeError, match="holds nothing"):
            kept(store, region)


@contextmanager
def stuck_at(disk, call, where=None):
    """Calls of one kind hang until the end of the block."""
    entered, release = threading.Event(), threading.Event()

    def hang(_, __, offset):
        if where in (None, offset):
            entered.set()
            release.wait(30)

    disk.faults[call] = hang
    try:
        yield entered, release
    finally:
        release.set()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_stuck_disk_is_named(tmp_path, call):
    disk = Disk()
    with opened(tmp_path, disk, timeout=0.2) as store:
        region = store.reserve("p", NUMEL, torch.float32)
        store.write(region, torch.ones(NUMEL)).wait()
        with stuck_at(disk, call) as (_, release):
            out = torch.empty(NUMEL)
            first = store.read(region, out) if call == "preadv" else store.write(region, torch.zeros(NUMEL))
            then = store.read(region, out)
            kind = "read" if call == "preadv" else "write"
            for handle in (first, then):
                with pytest.raises(NvmeError, match=rf"of p, .* is stuck(?s:.*)the {kind} of p, bytes 0 to"):
                    handle.wait()
                assert not handle.done
            release.set()
            for handle in (first, then):
                handle.wait(timeout=20)
            assert torch.equal(out, torch.full((NUMEL,), 1.0 if call == "preadv" else 0.0))


def test_a_request_stuck_beside_others_that_move_is_named(tmp_path):
    disk = Disk()
    with opened(tmp_path, disk, timeout=0.4) as store:
        stuck, moving = (store.reserve(name, 10, torch.float32, zeros=True) for name in ("stuck", "moving"))
        with stuck_at(disk, "pwritev", where=stuck._contents.position):
            handle = store.write(stuck, torch.ones(10))
            ended = threading.Event()

            def keep_moving():
                while not ended.is_set():
                    store.write(moving, torch.ones(10)).wait()
                    time.sleep(0.01)

            other = threading.Thread(target=keep_moving)
            other.start()
            try:
                with pytest.raises(NvmeError, match=r"write of stuck, bytes 0 to 40 in .* is stuck"):
                    handle.wait()
            finally:
                ended.set()
                other.join()


def test_a_slow_disk_that_moves_is_waited_for(tmp_path):
    disk = Disk(pwritev=lambda *_: time.sleep(0.05))
    with NvmeStore(tmp_path, block_bytes=4096, threads=1, syscalls=disk, timeout=1.5) as store:
        region = store.reserve("p", 40 * 1024, torch.float32)
        began = time.monotonic()
        store.write(region, torch.ones(40 * 1024)).wait()
        assert time.monotonic() - began > 1.5


def test_closing_never_hangs(tmp_path):
    disk = Disk()
    store = opened(tmp_path, disk, timeout=0.2)
    regions = [store.reserve(f"p{i}", NUMEL, torch.float32) for i in range(5)]
    with stuck_at(disk, "pwritev") as (entered, _):
        handles = [store.write(region, torch.ones(NUMEL)) for region in regions]
        assert entered.wait(20)
        began = time.monotonic()
        with pytest.warns(UserWarning, match="is stuck; its space is freed"):
            store.close()
        assert time.monotonic() - began < 5
        assert open_file(store.path)
    for handle in handles:
        with pytest.raises(NvmeError, match="is closed"):
            handle.wait(timeout=20)
    assert closed(store.path)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "may not write there"),
        (errno.EROFS, "mounted read-only"),
        (errno.EMFILE, "too many open files"),
        (errno.EIO, "the disk or its connection fails"),
    ],
)
def test_a_directory_that_cannot_be_written_is_refused(tmp_path, number, words):
    with pytest.raises(
        NvmeError, match=rf"cannot make the scratch file {re.escape(str(tmp_path))}(?s:.*){words}"
    ):
        opened(tmp_path, Disk(open=fails(number)))


def test_a_file_system_without_direct_io(tmp_path):
    def refuse(path, flags):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    disk = Disk(open=refuse)
    with pytest.raises(NvmeError, match="no direct I/O for"):
        opened(tmp_path, disk, direct=True)
    with opened(tmp_path, disk) as store:
        assert not store.direct
        region = store.reserve("p", NUMEL, torch.float32)
        store.write(region, torch.ones(NUMEL)).wait()
        assert torch.equal(kept(store, region), torch.ones(NUMEL))


@pytest.mark.parametrize("sector", [16384, 1 << 20])
def test_a_disk_with_large_sectors(tmp_path, sector):
    system = Syscalls()

    def checked(call, descriptor, buffers, offset):
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        if direct and (offset % sector or any(len(view) % sector for view in buffers)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(descriptor, buffers, offset)

    disk = Disk(preadv=lambda *a: checked(system.preadv, *a), pwritev=lambda *a: checked(system.pwritev, *a))
    with NvmeStore(tmp_path, block_bytes=65536, syscalls=disk) as store:
        assert store.direct == (sector == 16384)
        assert store.alignment == (16384 if store.direct else 4096)
        region = store.reserve("p", 40000, torch.float32)
        sent = store.buffer(40000, torch.float32).normal_()
        store.write(region, sent).wait()
        assert torch.equal(kept(store, region), sent)
    if sector > 65536:
        with pytest.raises(NvmeError, match="aligned to 65536 bytes are refused"):
            NvmeStore(tmp_path, block_bytes=65536, syscalls=disk, direct=True)


def test_a_disk_that_lies_at_once_is_refused(tmp_path):
    disk = Disk(pwritev=lambda _, buffers, __: sum(map(len, buffers)))
    disk.faults["preadv"] = lambda _, buffers, __: sum(map(len, buffers))
    with pytest.raises(NvmeError, match="does not return what was written"):
        opened(tmp_path, disk, direct=True)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB: (directory, disk). Where mounting is refused, a disk that is full at 4 MiB."""
    full = 4 << 20
    mount = ["mount", "-t", "tmpfs", "-o", f"size={full}", "tmpfs", str(tmp_path)]
    if not subprocess.run(mount, capture_output=True).returncode:
        yield tmp_path, Disk()
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
        return

    def bounded(_, offset, length):
        if offset + length > full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = Disk(fallocate=bounded)
    disk.free_bytes = lambda path: full
    yield tmp_path, disk


@pytest.mark.filterwarnings("ignore:.*no disk but memory")
def test_a_full_disk_is_found_before_anything_is_written(small_disk):
    directory, disk = small_disk
    with pytest.raises(NvmeError, match=r"(?s)too small.*4194304 bytes free"):
        opened(directory, disk, capacity=5 << 20)
    with opened(directory, disk) as store:
        first = store.reserve("first", 700_000, torch.float32)
        store.write(first, torch.ones(700_000)).wait()
        taken = store.reserved_bytes
        words = r"cannot reserve 2002944 bytes for layers\.1\.weight in (?s:.*)ENOSPC(?s:.*)bytes are free"
        for _ in range(2):
            with pytest.raises(NvmeError, match=words):
                store.reserve("layers.1.weight", 500_000, torch.float32)
        assert store.reserved_bytes == taken
        second = store.reserve("second", 300_000, torch.float32)
        store.write(second, torch.full((300_000,), 2.0)).wait()
        assert torch.equal(kept(store, first), torch.ones(700_000))
        assert torch.equal(kept(store, second), torch.full((300_000,), 2.0))
    with opened(directory, disk) as store:
        store.reserve("all of it", 900_000, torch.float32)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "read", "part"]),
        st.integers(0, 1),
        st.sampled_from(["", "", "EIO on write", "EIO on read", "lost", "flipped"]),
        st.integers(0, 2),
    ),
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, direct=st.booleans())
def test_whatever_fails_a_read_is_right_or_an_error(tmp_path_factory, steps, direct):
    """The twin of a region is its tensor, or None once a write of it failed or was damaged, until a whole write."""
    disk, numel = Disk(), 2 * BLOCK // 4 + 300

    def flipped(descriptor, buffers, offset):
        data = bytearray().join(bytes(view) for view in buffers)
        data[0] ^= 128
        page = mmap.mmap(-1, len(data))
        page[:] = bytes(data)
        return os.pwritev(descriptor, [page], offset)

    def at(call, nth, fault):
        counter = itertools.count()
        disk.faults[call] = lambda *a: fault(*a) if next(counter) == nth else None

    with opened(tmp_path_factory.getbasetemp(), disk, direct=direct) as store:
        regions = [store.reserve(name, numel, torch.float32, zeros=True) for name in "ab"]
        twin: list[torch.Tensor | None] = [torch.zeros(numel), torch.zeros(numel)]
        damaged = [set(), set()]
        for value, (what, which, fault, nth) in enumerate(steps):
            disk.faults.clear()
            if fault == "EIO on write":
                at("pwritev", nth, fails(errno.EIO))
            elif fault == "EIO on read":
                at("preadv", nth, fails(errno.EIO))
            elif fault == "lost":
                at("pwritev", nth, lambda _, buffers, __: sum(map(len, buffers)))
            elif fault == "flipped":
                at("pwritev", nth, flipped)
            offset, size = (0, numel) if what != "part" else (BLOCK // 4 - 50, 100)
            sent = torch.full((size,), float(value + 1))
            try:
                if what == "read":
                    found, wanted = kept(store, regions[which]), twin[which]
                    assert wanted is not None and torch.equal(found, wanted)
                else:
                    store.write(regions[which], sent, offset).wait()
            except NvmeError:
                if what != "read":
                    twin[which] = None
                assert fault or twin[which] is None or damaged[which]
            else:
                if what == "write":
                    twin[which], damaged[which] = sent, set()
                elif what == "part":
                    assert twin[which] is not None
                    twin[which][offset : offset + size] = sent
                if what != "read" and fault in ("lost", "flipped"):
                    damaged[which].add(value)
        disk.faults.clear()
        for which, region in enumerate(regions):
            try:
                found = kept(store, region)
            except NvmeError:
                assert twin[which] is None or damaged[which]
            else:
                assert twin[which] is not None and torch.equal(found, twin[which])


def test_space_found_short_halfway_is_given_back(tmp_path):
    def halfway(descriptor, offset, length):
        os.posix_fallocate(descriptor, offset, length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = Disk()
    with opened(tmp_path, disk) as store:
        store.reserve("first", NUMEL, torch.float32)
        disk.faults["fallocate"] = halfway
        with pytest.raises(NvmeError, match=r"cannot reserve \d+ bytes for second"):
            store.reserve("second", 1 << 20, torch.float32)
        assert os.stat(open_file(store.path)).st_size == store.reserved_bytes
