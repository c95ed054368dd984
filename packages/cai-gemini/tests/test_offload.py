"""An offloaded model trains as an ordinary one, bit for bit in the same dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cai_gemini import HostResidency, offload
from cai_mesh.errors import PlanError
from cai_mesh.flat import FlatChunk
from cai_mesh.protocols import Residency, Stored


class Block(nn.Module):
    def __init__(self, recompute: bool):
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(6, 12), nn.Linear(12, 6), recompute

    def forward(self, x):
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)

    def body(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks, a tied head, a frozen block and one that is used only in odd steps."""

    def __init__(self, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(Block(recompute) for _ in range(4))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)

    def forward(self, ids, odd):
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x) if i != 2 or odd else x
        return self.head(x)


def train(model, opt, steps=4):
    losses = []
    for step in range(steps):
        for micro in range(2):
            ids = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(10 * step + micro))
            loss = nn.functional.cross_entropy(model(ids, step % 2 == 1).flatten(0, 1), ids.flatten())
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    return losses


def build(recompute):
    torch.manual_seed(0)
    model = Net(recompute)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


@pytest.mark.parametrize("recompute", [False, True])
def test_losses_and_weights_are_those_without_offload(recompute):
    model, opt = build(recompute)
    expected = train(model, opt)
    names = [n for n, _ in model.named_parameters()]
    moved, moved_opt = offload(*build(recompute))
    assert [n for n, _ in moved.named_parameters()] == names
    assert train(moved, moved_opt) == pytest.approx(expected, rel=1e-6)
    for (name, a), (_, b) in zip(model.named_parameters(), moved.named_parameters(), strict=True):
        torch.testing.assert_close(b.view(a.shape), a, rtol=1e-5, atol=1e-6, msg=name)


def test_weights_are_whole_only_while_used():
    model, _ = offload(*build(False))
    sizes = []
    model.layers[3].register_forward_pre_hook(
        lambda *_: sizes.append([len(p.shape) for p in model.parameters()])
    )
    ids = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad():
        model(ids, True)
    assert sizes[0][1:5] == [1, 1, 1, 1], "the first block is still whole while the last one runs"
    assert sizes[0][-4:] == [2, 1, 2, 1], "the last block is not whole in its own forward"
    assert all(p.dim() == 1 for p in model.parameters())


def test_bfloat16_on_the_device_keeps_host_masters():
    model, opt = offload(*build(False), compute=torch.bfloat16)
    losses = train(model, opt, steps=12)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(losses[-4:]) < sum(losses[:4])


def test_host_residency_is_a_residency():
    residency = HostResidency(pin=False)
    assert isinstance(residency, Residency)
    home = residency.place(torch.arange(4.0))
    stored = Stored(FlatChunk([("w", home)]), home, torch.device("meta"))
    residency.fetch(stored).wait()
    assert stored.on_device is not None
    assert stored.on_device.device.type == "meta"
    residency.release(stored)
    assert stored.on_device is None


def test_errors():
    model, opt = build(False)
    with pytest.raises(PlanError, match="residency"):
        offload(model, opt, residency="tape")
    with pytest.raises(PlanError, match="does not have"):
        offload(model, torch.optim.SGD(Net().parameters(), lr=0.1))
    train(model, opt, steps=1)
    with pytest.raises(PlanError, match="already stepped"):
        offload(model, opt)
