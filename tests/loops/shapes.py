"""Loops that ask parameters and gradients for their shape, or for places in them, after sharding."""

from __future__ import annotations

import math

import torch
from loops.cases import REFUSED, case, steps
from torch import nn


def named(run):
    return list(run.model.named_parameters())


@case
def decay_groups_by_dimension(run):
    """nanoGPT, timm: what has one dimension is not decayed. Options by name where the groups cannot be made anew."""
    decayed = {name for name, p in named(run) if p.dim() >= 2}
    assert {name for name, p in named(run) if p.ndim > 1 and len(p.shape) > 1} == decayed
    run.see(len(decayed))

    def decay(run):
        with torch.no_grad():
            for name, p in named(run):
                if name in decayed:
                    p.mul_(0.9)

    steps(run, after_step=decay)


@case
def counted_parameters(run):
    run.see(sum(p.numel() for p in run.model.parameters()))
    run.see(sum(p.nelement() * 2 for _, p in named(run) if p.requires_grad))
    run.see(sum(math.prod(p.shape) for p in run.model.parameters()))
    run.see(sum(torch.numel(p) for p in run.model.parameters()))
    run.see(sum(p.size(0) for _, p in named(run) if p.dim()))
    run.see(sum(len(p) for _, p in named(run) if p.dim()))
    run.see(sum(p.stride(0) for _, p in named(run) if p.dim()))
    run.see(sum(p.data.ndim + p.detach().dim() + p.data.numel() for _, p in named(run)))
    steps(run, count=1)
    run.see(sum(torch.zeros_like(p).dim() for p in run.model.parameters()))


@case
def counted_frozen_parameters(run):
    run.model.embed.requires_grad_(False)
    steps(run, count=1)
    run.see(sum(p.numel() for p in run.model.parameters() if not p.requires_grad))
    run.see(run.model.embed.weight.shape[0] * 100 + run.model.embed.weight.shape[1])


@case
def a_rate_by_the_fan_in(run):
    """Of muP and LARS-like loops: an update by hand whose size depends on the parameter's."""
    for batch in run.batches(3):
        run.loss(batch).backward()
        with torch.no_grad():
            for p in run.model.parameters():
                fan = p.shape[1] if p.ndim == 2 else 1
                p.add_(p.grad, alpha=-0.1 / fan / p.numel() ** 0.5)
        run.model.zero_grad()


@case
def root_mean_square_of_updates(run):
    def look(run):
        for p in run.model.parameters():
            run.see((p.grad.square().sum() / p.grad.numel()).sqrt())
            run.see(p.detach().square().mean().sqrt())
            run.see(p.data.norm() / p.numel() ** 0.5)
            run.see(p.grad.ndim + p.grad.shape.numel() + p.grad.dim())

    steps(run, look, count=2)


@case
def trust_ratios_by_hand(run):
    def trust(run):
        for p in run.model.parameters():
            if p.ndim > 1:
                p.grad.mul_(p.data.norm() / (p.grad.norm() + 1e-6) * 0.01)

    steps(run, trust)


@case
def noise_of_the_shape(run):
    def noise(run):
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in run.model.parameters():
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.01)

    steps(run, after_step=noise)


@case
def rows_of_data_are_written(run):
    def write(run):
        run.model.embed.weight.data[:4] = 0
        run.model.head.weight.data[2].mul_(0.5)

    steps(run, after_step=write)


@case
def rows_are_written(run):
    def write(run):
        with torch.no_grad():
            run.model.embed.weight[:4] = 0

    steps(run, after_step=write)


@case
def rows_are_filled(run):
    def write(run):
        with torch.no_grad():
            run.model.embed.weight.index_fill_(0, torch.tensor([1, 5]), 0.25)

    steps(run, after_step=write)


@case
def rows_normalised(run):
    """Unit norm, as embeddings of speakers and faces have it."""

    def normalise(run):
        weight = run.model.head.weight
        weight.data.copy_(nn.functional.normalize(weight.data, dim=1))

    steps(run, after_step=normalise)


@case
def data_replaced(run):
    def replace(run):
        for p in run.model.parameters():
            p.data = p.data
            p.data = p.data * 0.9

    steps(run, after_step=replace)


@case
def a_mask_kept(run):
    """Of pruning: made of magnitudes, put on weights and gradients."""
    masks = {name: (p.detach().abs() > 0.1).to(p.dtype) for name, p in named(run) if p.ndim > 1}
    run.see(sum(mask.sum() for mask in masks.values()))

    def mask(run):
        with torch.no_grad():
            for name, p in named(run):
                if name in masks:
                    p.mul_(masks[name])
                    p.grad.mul_(masks[name])

    steps(run, mask)


@case
def a_mask_by_quantile(run):
    weight = run.model.layers[1].up.weight
    limit = torch.quantile(weight.detach().abs().flatten(), 0.5)
    run.see(limit)

    def prune(run):
        weight = run.model.layers[1].up.weight
        weight.data.masked_fill_(weight.data.abs() < limit, 0.0)

    steps(run, after_step=prune)


@case
def pulled_to_where_it_began(run):
    """L2-SP and elastic weight consolidation: a loss of the distance to the first weights."""
    first = {name: p.detach().clone() for name, p in named(run)}
    for batch in run.batches(3):
        distance = sum(((p - first[name]) ** 2).sum() for name, p in named(run))
        run.see(distance)
        (run.loss(batch) + 0.1 * distance).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def norms_in_the_loss(run):
    for batch in run.batches(3):
        size = sum(p.norm(2) for _, p in named(run) if p.ndim > 1)
        flat = sum(p.abs().mean() for p in run.model.parameters())
        run.see(size + flat)
        (run.loss(batch) + 1e-2 * size + 1e-2 * flat).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def norms_of_weights_seen(run):
    def look(run):
        for p in run.model.parameters():
            run.see(p.norm().detach())
            run.see(p.abs().mean())
            run.see(p.detach().max())
            with torch.no_grad():
                run.see(p.std() if p.numel() > 1 else 0.0)
                run.see(p.sum())

    steps(run, after_step=look, count=2)


@case
def a_vector_of_all_and_back(run):
    def halve(run):
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(run.model.parameters())
            run.see(vector.numel() + vector.norm())
            at = 0
            for p in run.model.parameters():
                p.copy_(vector[at : at + p.numel()].view_as(p) * 0.9)
                at += p.numel()

    steps(run, after_step=halve, count=2)


@case
def orthogonality_in_the_loss(run):
    for batch in run.batches(2):
        weight = run.model.head.weight
        loss = (
            run.loss(batch) + 1e-2 * (weight.t() @ weight - torch.eye(6, dtype=weight.dtype)).square().sum()
        )
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def a_spectral_norm_seen(run):
    def look(run):
        with torch.no_grad():
            run.see(torch.linalg.matrix_norm(run.model.head.weight.detach(), 2))

    steps(run, after_step=look, count=2)


@case
def gradients_made_of_shapes(run):
    """Weak gradients for what has none: as loops do that every parameter must have one."""
    for batch in run.batches(3):
        run.loss(batch, skip=1).backward()
        for p in run.model.parameters():
            if p.grad is None:
                p.grad = torch.zeros(p.shape, dtype=p.dtype)
        run.optimizer.step()
        run.optimizer.zero_grad()


@case
def whole_weights_loaded(run):
    steps(run, count=1)
    torch.manual_seed(3)
    whole = type(run.model)().double().state_dict()
    run.model.load_state_dict(whole)
    steps(run, count=2)


@case
def weights_made_anew(run):
    def anew(run):
        nn.init.constant_(run.model.head.weight, 0.1)
        nn.init.zeros_(run.model.head.bias)
        nn.init.eye_(run.model.layers[0].up.weight.data)

    steps(run, count=1)
    anew(run)
    steps(run, count=2)


OUTSIDE = "was used outside its block"
REFUSED |= (
    {("data_replaced", stage): "does not lie in its chunk any more" for stage in ("zero0", "zero1", "zero2")}
    | {
        ("data_replaced", stage): "another tensor was put in the data"
        for stage in ("zero3", "offload", "residency")
    }
    | {
        (name, stage): OUTSIDE
        for stage in ("zero3", "offload", "residency")
        for name in ("rows_are_written", "rows_are_filled", "orthogonality_in_the_loss")
    }
)
