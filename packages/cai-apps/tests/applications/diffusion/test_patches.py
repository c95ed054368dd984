"""Pictures that several ranks make in strips are those of one device, or close to them where neighbours are stale."""

from __future__ import annotations

import diffusers
import pytest
import torch
import torch.distributed as dist

from cai_apps.applications.diffusion.design import load_design
from cai_apps.applications.diffusion.patches import split_denoiser
from cai_apps.applications.diffusion.sample import Options, denoise, make_scheduler
from cai_mesh.testing import run_ranks

NAMES = ["sd-v1-tiny", "sd-v2-tiny", "dit-tiny", "sd3-tiny"]


def built(name):
    """A denoiser with random weights in float64, no layer at zero, no attention alike for all tokens."""
    design = load_design(name)
    torch.manual_seed(0)
    denoiser = getattr(diffusers, design.denoiser["_class_name"]).from_config(dict(design.denoiser))
    denoiser = denoiser.double().eval().requires_grad_(False)
    for param in denoiser.parameters():
        param.add_(0.05 * torch.randn_like(param))
    return design, denoiser


def given(design, n):
    generator = torch.Generator().manual_seed(1)
    held = {}
    for what in design.family.condition.split(" and "):
        if what == "label":
            held[what] = torch.arange(n)
        else:
            width = design.denoiser[design.family.widths[what]]
            shape = (n, 5, width) if what == "text" else (n, width)
            held[what] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return held


def noise(design, height, width):
    generator = torch.Generator().manual_seed(2)
    shape = (2, design.denoiser["in_channels"], height, width)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def caller(design, forward):
    condition = given(design, 2)

    def call(x, time):
        return forward(**design.family.takes(x, time.expand(2), condition))[:, : x.shape[1]]

    return call


def both(name, height, width, steps, **options):
    """Of one forward and of a whole sampling: the largest difference from one device, and the bytes received."""
    design, alone = built(name)
    _, denoiser = built(name)
    whole = noise(design, height, width)
    one = caller(design, lambda **taken: alone(**taken, return_dict=False)[0])
    split = split_denoiser(denoiser, dist.group.WORLD, **options)
    several = caller(design, split.forward)
    time = torch.tensor(500)
    once = (split.gather(several(split.start(whole), time)) - one(whole, time)).abs().max().item()
    expected = denoise(one, whole, make_scheduler(design, Options(steps=steps)))
    found = split.gather(denoise(several, split.start(whole), make_scheduler(design, Options(steps=steps))))
    return once, ((found - expected).abs().max() / expected.abs().max()).item(), split.nbytes


def shapes(name):
    return [(16, 16)] if name == "dit-tiny" else [(16, 12), (24, 16)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_exact_is_one_device(name, ranks):
    for height, width in shapes(name):
        for once, sampled, nbytes in run_ranks(ranks, both, name, height, width, 3, mode="exact"):
            assert once < 1e-9
            assert sampled < 1e-9
            assert nbytes > 0


@pytest.mark.parametrize("name", NAMES)
def test_stale_is_close_and_exact_while_it_warms_up(name):
    for once, sampled, _ in run_ranks(2, both, name, 16, 16, 3, mode="stale", warmup=3):
        assert once < 1e-9
        assert sampled < 1e-9
    for _, sampled, _ in run_ranks(2, both, name, 16, 16, 12, mode="stale", warmup=4):
        assert 1e-9 < sampled < 0.2
