"""Block inputs on the host, on a CUDA device: the same bits as recompute, in less memory."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cai_gemini import offload_activations

pytestmark = pytest.mark.gpu

DEPTH, TOKENS, DIM = 24, 8192, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), nn.Dropout(0.1)

    def forward(self, x, *, scale):
        return x + self.drop(self.down(torch.relu(self.up(x)))) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x):
        scale = torch.full((TOKENS, 1), 0.5, device=x.device)
        for layer in self.layers:
            x = layer(x, scale=scale)
        return x.square().mean()


def steps(model):
    """Losses, gradients, and the most memory beside the model of three steps, with no wait in between."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(1)
    x = torch.randn(TOKENS, DIM, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x)
        loss.backward()
        losses.append(loss.detach())
    most = torch.cuda.max_memory_allocated() - before
    return losses, [p.grad.cpu() for p in model.parameters()], most


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_bit_for_bit_recompute_in_less_memory(in_flight):
    twin = Net().cuda()
    for layer in twin.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    losses, grads, most = steps(twin)
    del twin
    model = Net().cuda()
    offloaded = offload_activations(model, in_flight=in_flight)
    got = steps(model)
    assert all(torch.equal(a, b) for a, b in zip(got[0], losses, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(got[1], grads, strict=True))
    boundary = TOKENS * DIM * 4
    assert offloaded.host_bytes == pytest.approx((DEPTH - 1) * boundary, rel=0.01)
    assert got[2] < most - (DEPTH - 4 - 2 * in_flight) * boundary
