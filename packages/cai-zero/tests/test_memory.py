"""Bytes of model state that a rank holds while gradients accumulate, by stage, against the formulas of ZeRO."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from over_ranks import line
from torch import nn

from cai_mesh.testing import run_ranks
from cai_zero import MixedPrecision, ShardedOptimizer, shard_module, shard_optimizer, sharding_of

VOCAB = 256


class Net(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(nn.Linear(width, 8 * width, bias=False) for _ in range(layers))
        self.back = nn.ModuleList(nn.Linear(8 * width, width, bias=False) for _ in range(layers))

    def forward(self, ids):
        x = self.embed(ids)
        for up, down in zip(self.layers, self.back, strict=True):
            x = x + down(torch.tanh(up(x)))
        return x.float().square().mean()


def expected(stage: int, ranks: int, split: bool) -> dict[str, float]:
    """Bytes a parameter of each kind of state.

    Rajbhandari et al. (arXiv:1910.02054, section 3.1 and figure 1) count bfloat16 (there float16) parameters 2,
    gradients 2, and for Adam 12: master weights, mean and variance in float32. cai-zero reduces and keeps gradients in
    float32 unless `reduce` says otherwise, so gradients count 4 here. Stage 1 divides the 12 by the ranks, stage 2 the
    gradients too, stage 3 the parameters as well: its bfloat16 parameters exist only while a block is used, so of
    their 2 bytes nothing stays, and the shards that are left are the master weights. Of those in halves 2 bytes are the
    parameters.
    """
    return {
        "parameters": 2.0 if stage < 3 else 0.0,
        "gradients": 4.0 / (1 if stage < 2 else ranks),
        "master": (2.0 if split else 4.0) / (1 if stage < 1 else ranks),
        "moments": 8.0 / (1 if stage < 1 else ranks),
    }


def held(stage: int, split: bool, width: int = 96, layers: int = 4) -> dict[str, float]:
    """Bytes a parameter of each kind of state that this rank holds while gradients accumulate over microbatches.

    Measured on storages that are alive; what is neither parameter, master weight nor moment counts as gradients.
    """
    gc.collect()
    before = storages()
    mesh = line()
    torch.manual_seed(0)
    model, precision = Net(width, layers), MixedPrecision(compute=torch.bfloat16, split_master=split)
    count = sum(p.numel() for p in model.parameters())
    if stage == 3:
        sync = sharding_of(shard_module(model, mesh, precision=precision))
        optimizer = inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = sync = shard_optimizer(inner, mesh, model=model, stage=stage, precision=precision)
    model(torch.arange(VOCAB).view(8, -1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with sync.defer():  # the first microbatch of the next step
        model(torch.arange(VOCAB).view(8, -1)).backward()
    gc.collect()
    now = {at: size for at, size in storages().items() if before.get(at) != size}
    stepped = [p for group in inner.param_groups for p in group["params"]]
    kinds = {
        "parameters": [] if stage == 3 else list(model.parameters()),
        "master": masters(optimizer) if split else stepped,
        "moments": [t for p in stepped for t in inner.state[p].values() if t.ndim],
    }
    found = {kind: bytes_of(tensors) for kind, tensors in kinds.items()}
    found["gradients"] = sum(now.values()) - sum(found.values())
    return {kind: size / count for kind, size in found.items()}


def masters(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    """What is kept of those in halves: the numbers, which have no memory now, and the lower halves."""
    halves = [(chunk.weights.flat, chunk.weights.halves.parts[0][1]) for chunk in optimizer.chunks]
    return [tensor for pair in halves for tensor in pair]


def bytes_of(tensors: list[torch.Tensor]) -> int:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def storages() -> dict[int, int]:
    """Address and bytes of the storage of every tensor that the interpreter knows.

    A tensor that an earlier test of this process traced has a storage without memory, and cannot say its address.
    """
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type == "cpu":
            with contextlib.suppress(RuntimeError):
                found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("stage", "split"), [(0, False), (1, False), (2, False), (3, False), (0, True), (1, True), (2, True)]
)
def test_model_state_is_what_the_formulas_say(stage: int, split: bool, ranks: int):
    wanted = expected(stage, ranks, split)
    for got in run_ranks(ranks, held, stage, split):
        for kind, size in wanted.items():
            assert got[kind] == pytest.approx(size, rel=0.03, abs=0.01), f"{kind}: {got}, expected {wanted}"
        assert sum(got.values()) == pytest.approx(sum(wanted.values()), rel=0.03)
