"""Tensors on a disk come back as they went, in the order asked for, whatever their size, address and place."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from disks import closed, kept, open_file
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_gemini.nvme import NvmeError, NvmeStore, Syscalls
from cai_gemini.nvme.engine import Spans
from cai_gemini.nvme.syscalls import file_system
from cai_mesh.protocols import CommHandle

BLOCK = 8192
SIZES = (1, 100, 1024, BLOCK // 4, BLOCK // 4 + 1, 3 * BLOCK // 4, 5 * BLOCK // 4 + 77)


@pytest.fixture
def store(tmp_path):
    with NvmeStore(tmp_path, block_bytes=BLOCK, threads=3) as made:
        yield made


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("checksums", [True, False])
def test_tensors_come_back(tmp_path, direct, checksums):
    with NvmeStore(tmp_path, block_bytes=BLOCK, direct=direct, checksums=checksums) as store:
        assert store.direct is direct
        sent = [store.buffer(size, torch.float32).normal_() for size in SIZES]
        sent += [torch.randn(size + 1)[1:] for size in SIZES]
        sent += [torch.randn(50, 70).bfloat16(), torch.randint(0, 255, (9001,), dtype=torch.uint8)]
        regions = [store.reserve(f"p{i}", t.numel(), t.dtype) for i, t in enumerate(sent)]
        handles = [store.write(region, t) for region, t in zip(regions, sent, strict=True)]
        assert all(isinstance(handle, CommHandle) for handle in handles)
        for handle in handles:
            handle.wait()
            assert handle.done
        for region, t in zip(regions, sent, strict=True):
            assert torch.equal(kept(store, region), t.flatten())
            out = store.buffer(region.numel, region.dtype)
            store.read(region, out).wait()
            assert torch.equal(out, t.flatten())


def test_memory_from_buffer_goes_without_a_copy(store):
    assert store.direct
    with torch.device("meta"):  # a default device is not the disk's
        whole = store.buffer(4096, torch.float32)
    whole.normal_()
    assert whole.data_ptr() % store.alignment == 0
    region = store.reserve("p", 4096, torch.float32)
    store.write(region, whole).wait()
    store.read(region, whole).wait()
    assert store.traffic.bounced_bytes == 0
    assert store.traffic.written_bytes == store.traffic.read_bytes == 4 * 4096
    store.write(region, torch.randn(4097)[1:]).wait()
    assert store.traffic.bounced_bytes == 4 * 4096
    assert store.traffic.requests == 3
    odd = store.reserve("odd", 4096 + 5, torch.float32)
    store.write(odd, store.buffer(4096 + 5, torch.float32)).wait()
    assert store.traffic.bounced_bytes == 4 * 4096 + 4 * 5


def test_a_part_leaves_the_rest_alone(store):
    twin = torch.randn(7000)
    region = store.reserve("p", 7000, torch.float32)
    store.write(region, twin).wait()
    for offset, size in ((0, 10), (5, 3000), (2047, 2), (2048, 2048), (6990, 10), (1, 6999)):
        part = torch.randn(size)
        store.write(region, part, offset)
        twin[offset : offset + size] = part
        begin = max(0, offset - 20)
        assert torch.equal(kept(store, region, 30, begin), twin[begin : begin + 30])
    assert torch.equal(kept(store, region), twin)


def test_what_was_never_written_is_an_error_or_zeros(store):
    region = store.reserve("layers.3.weight", 5000, torch.float32)
    with pytest.raises(NvmeError, match=r"layers\.3\.weight, bytes 0 to 20000.*never"):
        kept(store, region)
    store.write(region, torch.ones(1000), 2000).wait()
    assert torch.equal(kept(store, region, 1000, 2000), torch.ones(1000))
    with pytest.raises(NvmeError, match="not all of it was ever written"):
        kept(store, region, 1001, 2000)
    store.write(region, torch.ones(2000), 0)
    store.write(region, torch.ones(2000), 3000)
    assert torch.equal(kept(store, region), torch.ones(5000))
    moments = store.reserve("moments", 5000, torch.bfloat16, zeros=True)
    before = store.traffic.read_bytes
    assert torch.equal(kept(store, moments), torch.zeros(5000).bfloat16())
    store.write(moments, torch.ones(3, dtype=torch.bfloat16), 4000)
    assert kept(store, moments).sum() == 3
    assert store.traffic.read_bytes - before == 4 * 5000


def test_spans_are_a_set():
    spans, twin = Spans(), set()
    for start, stop in ((10, 20), (30, 40), (20, 25), (5, 5), (24, 31), (0, 3), (3, 10), (50, 60)):
        spans.add(start, stop)
        twin |= set(range(start, stop))
        for a in range(62):
            for b in range(a, 62):
                assert spans.covers(a, b) == (set(range(a, b)) <= twin)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["write", "read", "wait"]),
        st.integers(0, 3),
        st.integers(0, 2999),
        st.integers(1, 3000),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS, direct=st.booleans(), seed=st.integers(0, 1000))
def test_any_interleaving_equals_a_dict_of_tensors(tmp_path_factory, actions, direct, seed):
    generator = torch.Generator().manual_seed(seed)
    with NvmeStore(tmp_path_factory.getbasetemp(), block_bytes=4096, threads=3, direct=direct) as store:
        numels = (3000, 1024, 1500, 1)
        regions = [store.reserve(f"p{i}", n, torch.float32, zeros=True) for i, n in enumerate(numels)]
        twin = {i: torch.zeros(n) for i, n in enumerate(numels)}
        pending, expected = [], []
        for what, which, offset, size in actions:
            offset = offset % numels[which]
            size = min(size, numels[which] - offset)
            if what == "write":
                part = torch.randn(size, generator=generator)
                pending.append(store.write(regions[which], part, offset))
                twin[which][offset : offset + size] = part
            elif what == "read":
                out = store.buffer(size, torch.float32) if size % 2 else torch.empty(size)
                pending.append(store.read(regions[which], out, offset))
                expected.append((out, twin[which][offset : offset + size].clone()))
            elif pending:
                pending[offset % len(pending)].wait()
        for handle in pending:
            handle.wait()
        for out, wanted in expected:
            assert torch.equal(out, wanted)
        for i, region in enumerate(regions):
            assert torch.equal(kept(store, region), twin[i])


class Gated(Syscalls):
    """Writes and reads that wait for a gate."""

    def __init__(self):
        self.gates = {"preadv": threading.Event(), "pwritev": threading.Event()}
        self.log = []
        self.open_gates()

    def open_gates(self):
        for gate in self.gates.values():
            gate.set()

    def preadv(self, descriptor, buffers, offset):
        self.gates["preadv"].wait(20)
        self.log.append("read")
        return super().preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor, buffers, offset):
        self.gates["pwritev"].wait(20)
        self.log.append("write")
        return super().pwritev(descriptor, buffers, offset)


@pytest.mark.parametrize("held", ["preadv", "pwritev"])
def test_requests_of_one_region_keep_their_order(tmp_path, held):
    system = Gated()
    with NvmeStore(tmp_path, block_bytes=BLOCK, threads=4, syscalls=system) as store:
        region, other = (store.reserve(name, 2048, torch.float32, zeros=True) for name in "ab")
        store.write(region, torch.ones(2048)).wait()
        store.write(other, torch.ones(2048)).wait()
        system.log.clear()
        system.gates[held].clear()
        first = torch.empty(2048)
        if held == "pwritev":
            store.write(region, torch.full((2048,), 2.0))
            read = store.read(region, first)
            store.read(other, torch.empty(2048)).wait()
            order = ["read", "write", "read"]
        else:
            read = store.read(region, first)
            store.write(region, torch.full((2048,), 2.0))
            store.write(other, torch.ones(2048)).wait()
            order = ["write", "read", "write"]
        assert not read.done and len(system.log) == 1
        system.open_gates()
        read.wait()
        assert torch.equal(first, torch.full((2048,), 2.0 if held == "pwritev" else 1.0))
        assert torch.equal(kept(store, region), torch.full((2048,), 2.0))
        assert system.log[:3] == order


def test_several_requests_are_under_way_at_once(tmp_path):
    system, together = Gated(), threading.Barrier(4, timeout=20)
    system.pwritev = lambda fd, views, offset: together.wait() * 0 + os.pwritev(fd, views, offset)
    with NvmeStore(tmp_path, block_bytes=BLOCK, threads=4, direct=False, syscalls=system) as store:
        region = store.reserve("p", BLOCK, torch.float32)
        store.write(region, torch.arange(BLOCK, dtype=torch.float32)).wait()
        assert torch.equal(kept(store, region), torch.arange(BLOCK, dtype=torch.float32))


def test_requests_that_do_not_fit_are_refused(store, tmp_path):
    region = store.reserve("p", 100, torch.float32)
    for tensor, offset, words in (
        (torch.zeros(101), 0, "outside of p"),
        (torch.zeros(1), 100, "outside of p"),
        (torch.zeros(1), -1, "outside of p"),
        (torch.zeros(10, dtype=torch.int32), 0, "torch.int32"),
        (torch.zeros(10, 4).t(), 0, "not contiguous"),
        (torch.zeros(10, device="meta"), 0, "on meta"),
    ):
        with pytest.raises(NvmeError, match=words):
            store.write(region, tensor, offset)
        with pytest.raises(NvmeError, match=words):
            store.read(region, tensor, offset)
    with pytest.raises(NvmeError, match="empty region for q"):
        store.reserve("q", 0, torch.float32)
    with NvmeStore(tmp_path, block_bytes=BLOCK) as other, pytest.raises(NvmeError, match="another store"):
        other.write(region, torch.zeros(100))
    with pytest.raises(NvmeError, match="multiple of 4096"):
        NvmeStore(tmp_path, block_bytes=5000)
    with pytest.raises(NvmeError, match="threads=0"):
        NvmeStore(tmp_path, threads=0)


def test_directories_that_cannot_serve_are_refused(tmp_path):
    with pytest.raises(NvmeError, match=r"(?s)cannot use the NVMe directory .*/none.*does not exist"):
        NvmeStore(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(NvmeError, match="is a file"):
        NvmeStore(tmp_path / "file")
    with pytest.raises(NvmeError, match="too small") as caught:
        NvmeStore(tmp_path, capacity=1 << 60)
    assert caught.value.expected == f"{1 << 60} bytes (capacity)"


def test_the_capacity_is_a_limit(tmp_path):
    with NvmeStore(tmp_path, block_bytes=BLOCK, capacity=20480) as store:
        store.reserve("a", 4000, torch.float32)
        with pytest.raises(NvmeError, match="no room for b"):
            store.reserve("b", 1025, torch.float32)
        store.reserve("c", 1024, torch.float32)
        assert store.reserved_bytes == 20480


def test_file_systems_are_known_by_their_mount():
    table = (
        "22 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "30 22 0:25 / /mnt/a\\040b rw shared:1 - tmpfs none rw\n"
        "31 22 0:26 / /mnt rw - xfs /dev/nvme0n1 rw\n"
        "32 22 0:27 / /z rw - ext4 /dev/zram0 rw\n"
    )
    assert file_system("/home", table).type == "ext4"
    assert file_system("/mnt/a b/c", table) == file_system("/mnt/a b", table)
    assert file_system("/mnt/a b", table).in_memory
    assert file_system("/mnt/ab", table).type == "xfs" and not file_system("/mnt/ab", table).in_memory
    assert file_system("/mntx", table).source == "/dev/vda"
    assert file_system("/z", table).in_memory
    assert file_system("/x", "").type == "unknown"


def test_a_directory_in_memory_is_named_as_such():
    with pytest.raises(NvmeError, match=r"(?s)/dev/shm lies in memory.*tmpfs mounted at /dev/shm"):
        NvmeStore("/dev/shm", require_disk=True)
    with pytest.warns(UserWarning, match="no disk but memory: tmpfs"), NvmeStore("/dev/shm") as store:
        assert store.in_memory


def test_a_disk_gives_no_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with NvmeStore(tmp_path, require_disk=not file_system(tmp_path).in_memory) as store:
            assert store.in_memory == file_system(tmp_path).in_memory


def test_two_stores_share_a_directory_and_leave_no_names(tmp_path):
    with NvmeStore(tmp_path, block_bytes=BLOCK) as a, NvmeStore(tmp_path, block_bytes=BLOCK) as b:
        first, second = (store.reserve("p", 3000, torch.float32) for store in (a, b))
        a.write(first, torch.ones(3000)).wait()
        b.write(second, torch.zeros(3000)).wait()
        assert torch.equal(kept(a, first), torch.ones(3000))
        assert torch.equal(kept(b, second), torch.zeros(3000))
        assert not os.listdir(tmp_path)


KILLED = """
import sys, time, torch
from cai_gemini.nvme import NvmeStore
store = NvmeStore(sys.argv[1])
region = store.reserve("p", 1 << 18, torch.float32)
store.write(region, torch.ones(1 << 18)).wait()
print("written", flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_nothing(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not os.listdir(tmp_path)


def test_closing_gives_everything_back(tmp_path):
    threads = threading.active_count()
    store = NvmeStore(tmp_path, threads=5)
    assert threading.active_count() == threads + 5 and open_file(store.path)
    region = store.reserve("p", 10, torch.float32)
    store.close()
    assert threading.active_count() == threads and not open_file(store.path)
    store.close()
    for request in (
        lambda: store.write(region, torch.ones(10)),
        lambda: store.reserve("q", 10, torch.float32),
    ):
        with pytest.raises(NvmeError, match="is closed"):
            request()


def test_the_last_reference_gives_everything_back(tmp_path):
    store = NvmeStore(tmp_path, block_bytes=BLOCK)
    path, region = store.path, store.reserve("p", 5000, torch.float32)
    handle = store.write(region, torch.ones(5000))
    del store
    gc.collect()
    handle.wait()
    assert open_file(path)
    del handle
    gc.collect()
    assert closed(path)


def test_a_fork_takes_nothing_away(tmp_path):
    with NvmeStore(tmp_path, block_bytes=BLOCK) as store:
        region = store.reserve("p", 5000, torch.float32)
        store.write(region, torch.ones(5000)).wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            store._engine._lock.acquire()  # as another thread may have at that moment
            child = os.fork()
        if child:
            store._engine._lock.release()
        else:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            code = 1
            try:
                store.read(region, torch.empty(5000))
            except NvmeError as error:
                code = 0 if "another process" in str(error) else 2
            store.close()
            store._engine.stop()
            os._exit(3 if store._file.stopped else code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(kept(store, region), torch.ones(5000))


@pytest.mark.gpu
def test_memory_from_buffer_is_pinned_and_direct_beside_a_gpu(store):
    sent = torch.randn(50_000, device="cuda")
    buffer, back = (store.buffer(50_000, torch.float32) for _ in range(2))
    assert buffer.is_pinned() and buffer.data_ptr() % store.alignment == 0
    region = store.reserve("p", 50_000, torch.float32)
    buffer.copy_(sent, non_blocking=True)
    torch.cuda.synchronize()
    store.write(region, buffer).wait()
    store.read(region, back).wait()
    assert torch.equal(back.to("cuda", non_blocking=True), sent)
    tail = 4 * 50_000 % store.alignment
    assert store.traffic.bounced_bytes == (2 * tail if store.direct else 0)
