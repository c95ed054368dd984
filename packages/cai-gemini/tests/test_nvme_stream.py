"""A stream over chunks on a disk is the plain loop over them, faster."""

from __future__ import annotations

import os
import random
import threading

import pytest
import torch
from disks import kept
from torch.optim.adamw import adamw

from cai_gemini.nvme import NvmeError, NvmeStore, Syscalls, stream

BLOCK = 4096


def put(store, name, tensor):
    region = store.reserve(name, tensor.numel(), tensor.dtype)
    store.write(region, tensor).wait()
    return region


def mix(index, tensors):
    """Work whose result depends on every chunk before it that shared a tensor, and on the order."""
    total = sum(t.double().sum() for t in tensors)
    for place, t in enumerate(tensors):
        t.mul_(0.5).add_((total / 1000).to(t.dtype) + index * (place + 1))


@pytest.mark.parametrize("buffers", [2, 3, 5])
@pytest.mark.parametrize("writes", [None, (0, 2), ()])
@pytest.mark.parametrize("seed", range(3))
def test_it_equals_the_loop(tmp_path, buffers, writes, seed):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    twin = [
        torch.randn(chance.choice((1, 700, 1024, 5000))).to(chance.choice((torch.float32, torch.bfloat16)))
        for _ in range(12)
    ]
    chunks = [chance.sample(range(12), chance.randrange(1, 5)) for _ in range(15)]
    with NvmeStore(tmp_path, block_bytes=BLOCK, threads=3) as store:
        regions = [put(store, f"p{i}", t) for i, t in enumerate(twin)]
        stream(store, [[regions[i] for i in chunk] for chunk in chunks], mix, buffers=buffers, writes=writes)
        for index, chunk in enumerate(chunks):
            before = [twin[i].clone() for i in chunk]
            mix(index, before)
            for place, i in enumerate(chunk):
                if writes is None or place in writes:
                    twin[i] = before[place]
        for region, t in zip(regions, twin, strict=True):
            assert torch.equal(kept(store, region), t)


def test_an_adam_step_over_state_on_disk_is_adams(tmp_path):
    torch.manual_seed(0)
    sizes = (3000, 5000, 100, 4096)
    master = [torch.randn(n) for n in sizes]
    with NvmeStore(tmp_path, block_bytes=BLOCK) as store:
        chunks = [
            [
                put(store, f"{i}.master", p),
                *(store.reserve(f"{i}.{k}", p.numel(), torch.float32, zeros=True) for k in ("m", "v")),
            ]
            for i, p in enumerate(master)
        ]
        optimizer = torch.optim.AdamW(master, lr=1e-2, weight_decay=0.1, fused=True)
        for step in range(3):
            grads = [torch.randn(n) for n in sizes]

            def update(index, tensors, grads=grads, step=step):
                p, m, v = tensors
                adamw(
                    *([p], [grads[index]], [m], [v], [], [torch.tensor(float(step))]),
                    fused=True,
                    amsgrad=False,
                    beta1=0.9,
                    beta2=0.999,
                    lr=1e-2,
                    weight_decay=0.1,
                    eps=1e-8,
                    maximize=False,
                )

            stream(store, chunks, update)
            for p, grad in zip(master, grads, strict=True):
                p.grad = grad
            optimizer.step()
        for p, (region, m, v) in zip(master, chunks, strict=True):
            assert torch.equal(kept(store, region), p)
            assert torch.equal(kept(store, m), optimizer.state[p]["exp_avg"])
            assert torch.equal(kept(store, v), optimizer.state[p]["exp_avg_sq"])


class Watched(Syscalls):
    """Announces reads and writes by their place in the file, and fails where told."""

    def __init__(self):
        self.seen, self.failing = {}, set()

    def event(self, kind, offset):
        return self.seen.setdefault((kind, offset), threading.Event())

    def _answer(self, kind, call, descriptor, buffers, offset):
        if (kind, offset) in self.failing:
            raise OSError(5, "Input/output error")
        moved = call(descriptor, buffers, offset)
        self.event(kind, offset).set()
        return moved

    def preadv(self, descriptor, buffers, offset):
        return self._answer("read", os.preadv, descriptor, buffers, offset)

    def pwritev(self, descriptor, buffers, offset):
        return self._answer("write", os.pwritev, descriptor, buffers, offset)


def watched(tmp_path, count=6):
    system = Watched()
    store = NvmeStore(tmp_path, block_bytes=BLOCK, threads=2, syscalls=system)
    regions = [put(store, f"p{i}", torch.full((1024,), float(i))) for i in range(count)]
    system.seen.clear()
    return system, store, regions


@pytest.mark.parametrize("buffers", [2, 3])
def test_work_overlaps_the_next_read_and_the_last_write(tmp_path, buffers):
    system, store, regions = watched(tmp_path)
    missed = []

    def work(index, tensors):
        ahead = [("read", regions[i]) for i in range(index + 1, index + buffers) if i < len(regions)]
        for kind, region in [*ahead, *([("write", regions[index - 1])] if index else [])]:
            if not system.event(kind, region._contents.position).wait(10):
                missed.append((index, kind, region.name))
        tensors[0].add_(1)

    with store:
        stream(store, [[region] for region in regions], work, buffers=buffers)
        assert not missed
        for i, region in enumerate(regions):
            assert torch.equal(kept(store, region), torch.full((1024,), i + 1.0))


def test_an_exception_leaves_nothing_running(tmp_path):
    _, store, regions = watched(tmp_path)

    def work(index, tensors):
        if index == 3:
            tensors[0].fill_(-1)
            raise KeyError("mine")
        tensors[0].add_(1)

    with store:
        with pytest.raises(KeyError, match="mine"):
            stream(store, [[region] for region in regions], work, buffers=3)
        assert not store._engine._busy and store._engine._queue.empty()
        for i, region in enumerate(regions):
            assert torch.equal(kept(store, region), torch.full((1024,), i + (1.0 if i < 3 else 0.0)))


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("failing", [0, 2, 5])
def test_a_failing_disk_ends_the_stream(tmp_path, kind, failing):
    system, store, regions = watched(tmp_path)
    system.failing.add((kind, regions[failing]._contents.position))
    done = []

    def work(index, tensors):
        done.append(index)
        tensors[0].add_(1)

    with store:
        with pytest.raises(NvmeError, match=f"the {kind} of p{failing}"):
            stream(store, [[region] for region in regions], work)
        assert not store._engine._busy and store._engine._queue.empty()
        assert done == list(range(len(done))) and (kind == "write" or len(done) == failing)
        system.failing.clear()
        for i, region in enumerate(regions):
            if kind == "write" and i == failing:
                with pytest.raises(NvmeError, match="holds nothing"):
                    kept(store, region)
            else:
                assert torch.equal(kept(store, region), torch.full((1024,), i + float(i in done)))


def test_what_makes_no_stream_is_refused(tmp_path):
    with NvmeStore(tmp_path, block_bytes=BLOCK) as store:
        region = put(store, "p", torch.ones(10))
        with pytest.raises(NvmeError, match="needs two buffers"):
            stream(store, [[region]], mix, buffers=1)
        with pytest.raises(NvmeError, match="chunk 1 names a region twice"):
            stream(store, [[region], [region, region]], mix)
        stream(store, [], mix)
        stream(store, [[]], lambda index, tensors: None)
        with NvmeStore(tmp_path, block_bytes=BLOCK) as other, pytest.raises(NvmeError, match="another store"):
            stream(other, [[region]], mix)


def test_what_is_not_read_and_when_a_chunk_may_be_read_again(tmp_path):
    """A region that `work` fills is never read; once `wrote` is called, reads see what `work` left."""
    with NvmeStore(tmp_path, block_bytes=BLOCK, threads=3) as store:
        values = [put(store, f"p{i}", torch.full((3000,), float(i))) for i in range(5)]
        fresh = [
            store.reserve(f"fresh {i}", 3000, torch.bfloat16) for i in range(5)
        ]  # reading them would raise
        seen, reads = [], {}

        def work(index, tensors):
            tensors[0].add_(10)
            tensors[1].fill_(index)

        def wrote(index):
            seen.append(index)
            reads[index] = [torch.empty(3000), torch.empty(3000, dtype=torch.bfloat16)]
            regions = (values[index], fresh[index])
            handles.extend(store.read(r, out) for r, out in zip(regions, reads[index], strict=True))

        handles = []
        stream(store, list(zip(values, fresh, strict=True)), work, unread=set(fresh), wrote=wrote)
        for handle in handles:
            handle.wait()
        assert seen == list(range(5))
        for index, (value, filled) in reads.items():
            assert value.eq(index + 10).all()
            assert filled.eq(index).all()


def test_the_next_loop_has_the_memory_of_the_last(tmp_path):
    with NvmeStore(tmp_path, block_bytes=BLOCK, threads=2) as store:
        small = [[put(store, f"{i}", torch.ones(100))] for i in range(3)]
        large = [[put(store, f"{i}", torch.ones(5000))] for i in range(3)]
        seen = []

        def note(_, tensors):
            seen.append(tensors[0].data_ptr())

        for chunks in (small, large, small, large):
            stream(store, chunks, note)
        assert set(seen[3:6]) == set(seen[6:9]) == set(seen[9:12]) and len(set(seen[3:])) == 2
        assert not set(seen[:3]) & set(seen[3:])
