"""The cache on a CUDA device: the same training as a plain table there, with copies on a stream of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cai_gemini import CachedEmbedding, RowwiseAdagrad, lookahead

pytestmark = pytest.mark.gpu

ROWS, DIM = 20_000, 16
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1),
    "adam": lambda params: torch.optim.SparseAdam(params, lr=0.01),
    "rowwise": lambda params: RowwiseAdagrad(params, lr=0.1),
}


def table():
    return torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def batches(steps):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield (torch.rand(512, 4, generator=generator) ** 6 * ROWS).long()


def step(module, optimizer, ids):
    work = torch.randn(512, 512, device="cuda")
    for _ in range(5):
        work = work @ work / 23
    loss = module(ids).tanh().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_a_plain_table(name, ahead, ids_on):
    plain = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, _weight=table().cuda())
    cached = CachedEmbedding(ROWS, DIM, cache=0.35, device="cuda", mode="sum", weight=table())
    optimizers = [OPTIMIZERS[name](module.parameters()) for module in (plain, cached)]
    expected = [step(plain, optimizers[0], ids.cuda()) for ids in batches(40)]
    stream = (ids.to(ids_on) for ids in batches(40))
    if ahead:
        stream = lookahead(stream, [cached], lambda ids: [ids], depth=ahead)
    losses = [step(cached, optimizers[1], ids) for ids in stream]
    assert cached.cache_stats().evicted > 1000
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(cached.table, plain.weight.data.cpu(), rtol=1e-9, atol=1e-9)


def test_a_prefetched_forward_makes_nobody_wait():
    cached = CachedEmbedding(ROWS, DIM, cache=0.5, device="cuda", mode="sum", weight=table())
    optimizer = OPTIMIZERS["sgd"](cached.parameters())
    ids, following = list(batches(2))
    step(cached, optimizer, ids)
    assert cached.prefetch(following)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = cached(following)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.detach().cpu(), cached.table[following].sum(1), rtol=1e-9, atol=1e-12)
