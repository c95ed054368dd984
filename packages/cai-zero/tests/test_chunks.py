"""Which parameters share a chunk, and in which order chunks reduce."""

from __future__ import annotations

import torch
from torch import nn

from cai_mesh.layout import ReduceSpec, attach
from cai_zero import MixedPrecision
from cai_zero.reduction.ranks import RankTable
from cai_zero.replicated import chunks
from cai_zero.replicated.chunks import build_chunks, reduction_order
from cai_zero.replicated.members import Members


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))


def built(model, inner):
    members = Members(inner, model)
    made = build_chunks(members.groups, members.units(), RankTable(None), MixedPrecision())
    return made, reduction_order(made, members.order, model)


def test_chunks_follow_the_backward(monkeypatch):
    monkeypatch.setattr(chunks, "BUCKET_ELEMENTS", 1)
    model = Net()
    made, order = built(model, torch.optim.SGD(model.parameters(), lr=1))
    assert [c.chunk.names[0] for c in order] == [
        "layers.2.0.weight",
        "layers.1.0.weight",
        "layers.0.0.weight",
        "embed.weight",
    ]
    assert len(made) == 4


def test_a_chunk_over_many_blocks_waits_for_the_first(monkeypatch):
    monkeypatch.setattr(chunks, "BUCKET_ELEMENTS", 16)
    model = Net()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    inner = torch.optim.SGD([{"params": matrices}, {"params": vectors, "lr": 2}], lr=1)
    made, order = built(model, inner)
    names = [c.chunk.names for c in order]
    first = [next(n for n in held).split(".")[1] for held in names[:-1]]
    assert first == sorted(first, reverse=True), "a chunk reduces before its earliest block is done"
    assert names[-1] == ("embed.weight",)
    assert {c.group for c in made} == {0, 1}
    for chunk in made:
        assert all((p.dim() > 1) == (chunk.group == 0) for p in chunk.params)


def test_kinds_do_not_share_a_chunk():
    model = Net()
    model.embed.double()
    attach(model.layers[0][0].weight, reduce=ReduceSpec(divisor=3.0))
    made, _ = built(model, torch.optim.SGD(model.parameters(), lr=1))
    assert len(made) == 3
    (wide,) = [c for c in made if c.weights.unsharded.dtype == torch.float64]
    assert wide.gradients.buffer.tensor.dtype == torch.float64
    assert {c.gradients.buffer.tensor.dtype for c in made if c is not wide} == {torch.float32}


def test_parameters_become_views():
    model = Net()
    model.embed.weight.data = torch.randn(4, 4).t()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    made, _ = built(model, torch.optim.SGD(model.parameters(), lr=1))
    (chunk,) = made
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
        assert param.untyped_storage().data_ptr() == chunk.weights.unsharded.untyped_storage().data_ptr()
    assert not chunk.weights.has_master
