"""Small models, a loop and its batches: what offloaded training is compared on."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cai_gemini import Tuning, offload
from cai_gemini.planning import Rates

SLOW_HOST = Rates(to_device=2e6, to_host=1e6, both=2e6, host_step=4e6, device_step=4e12)
STEPS = 6


class Block(nn.Module):
    def __init__(self, recompute: bool):
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(6, 12), nn.Linear(12, 6), recompute
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)

    def body(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, a tied head, a frozen block and one that is used only in some steps."""

    def __init__(self, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(Block(recompute) for _ in range(5))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)

    def forward(self, ids, skip):
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x) if i != 2 or not skip else x
        return self.head(x)


def build(recompute=False, dtype=torch.float32, optimizer=lambda params: adamw(params)):
    torch.manual_seed(0)
    model = Net(recompute).to(dtype)
    return model, optimizer(groups(model))


def groups(model):
    """Norms without decay: param groups cut through chunks."""
    plain = [p for n, p in model.named_parameters() if "norm" in n]
    return [
        {"params": [p for n, p in model.named_parameters() if "norm" not in n]},
        {"params": plain, "weight_decay": 0.0},
    ]


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)


def moved(model, optimizer, residency, device_memory="80KB", **options):
    """Both, offloaded, with rates that make it worth while to keep some of it on the device."""
    tuning = Tuning(rates=SLOW_HOST)
    return offload(
        model, optimizer, residency=residency, device_memory=device_memory, tuning=tuning, **options
    )


def torchs_clip(model, _):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def skipped(step):
    return step % 3 == 1


def train(model, opt, steps=STEPS, micro=2, clip=None):
    losses = []
    for step in range(steps):
        for part in range(micro):
            ids = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(10 * step + part))
            loss = nn.functional.cross_entropy(model(ids, skipped(step)).flatten(0, 1), ids.flatten())
            loss.backward()
            losses.append(loss.item())
        if clip:
            clip(model, opt)
        opt.step()
        opt.zero_grad()
    return losses


def train_with_a_late_branch(model, opt):
    """Block 2 is used from the fifth step on."""
    losses = []
    for step in range(6):
        ids = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids, step < 4).flatten(0, 1), ids.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal(model, twin):
    for (name, a), (_, b) in zip(twin.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(b.view(a.shape), a), name
