"""What copy engines add up, on the CPU: ranks are threads, and all memory can be addressed by all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from cai_mesh.comm import peer


def share_memory(monkeypatch, ranks: int) -> None:
    """Let threads meet in memory that all of them address, as GPUs of one host do."""
    memory: dict[int, torch.Tensor] = {}
    everybody = threading.Barrier(ranks)

    def meet(group, shape, device):
        own = memory[group.rank()] = torch.full(shape, 255, dtype=torch.uint8)
        everybody.wait()
        handle = SimpleNamespace(barrier=lambda channel: everybody.wait())
        return handle, own, [memory[rank] for rank in range(ranks)]

    monkeypatch.setattr(peer, "_meet", meet)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("elements", [128, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reduce_is_the_sum_in_pieces_of_any_size(monkeypatch, ranks, elements, dtype):
    share_memory(monkeypatch, ranks)
    monkeypatch.setattr(peer, "PIECE_BYTES", 5000)
    gen = torch.Generator().manual_seed(0)
    rounds = [torch.randn(ranks, ranks * elements, generator=gen, dtype=dtype) for _ in range(3)]

    def work(rank: int) -> list[torch.Tensor]:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
        reduce = peer.PeerReduce(group, elements * dtype.itemsize, torch.device("cpu"))
        assert reduce._slots.numel() <= peer.SLOTS * max(5000, 512 * (ranks - 1))
        found = []
        for full in rounds:
            found.append(torch.empty(elements, dtype=dtype))
            reduce(found[-1], full[rank])
        return found

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(work, range(ranks)))
    for index, full in enumerate(rounds):
        for rank, own in enumerate(full.sum(0).chunk(ranks)):
            torch.testing.assert_close(found[rank][index], own)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gather_tells_whose_part_has_been_issued_and_this_ranks_last(monkeypatch, ranks):
    share_memory(monkeypatch, ranks)
    gen = torch.Generator().manual_seed(0)
    rounds = [torch.randn(ranks, 40, generator=gen) for _ in range(4)]

    def work(rank: int) -> list[int]:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
        gather = peer.PeerGather(group, 160, torch.device("cpu"))
        for shards in rounds:
            whole, issued = torch.empty(ranks * 40), []
            for other in gather.parts(whole, shards[rank]):
                issued.append(other)
                torch.testing.assert_close(whole.view(ranks, -1)[other], shards[other], rtol=0, atol=0)
            assert sorted(issued) == list(range(ranks)) and issued[-1] == rank
        return issued

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(work, range(ranks)))


def test_whole_contributions_have_room(monkeypatch):
    """Larger than a piece: given one by one, added up by whoever meets."""
    share_memory(monkeypatch, 3)
    monkeypatch.setattr(peer, "PIECE_BYTES", 1024)
    full = torch.randn(3, 3, 1000, generator=torch.Generator().manual_seed(0))

    def work(rank: int) -> torch.Tensor:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: 3)
        reduce = peer.PeerReduce(group, 4000, torch.device("cpu"), whole=True)
        for _ in range(3):
            for other in reduce.others:
                reduce.give(full[rank, other], other)
            found = full[rank, rank] + reduce.meet(full[rank, rank]).sum(0)
        return found

    with ThreadPoolExecutor(3) as pool:
        for rank, found in enumerate(pool.map(work, range(3))):
            torch.testing.assert_close(found, full[:, rank].sum(0))
