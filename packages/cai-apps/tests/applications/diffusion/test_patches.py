"""Pictures that several ranks make in strips are those of one device, or close to them where neighbours are stale."""

from __future__ import annotations

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers.models.attention_processor import Attention, AttnProcessor
from torch import nn

from cai_apps import recipes
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.sampling.patches.branches import open_branches
from cai_apps.applications.diffusion.sampling.patches.denoiser import split_denoiser
from cai_apps.applications.diffusion.sampling.patches.exchange import Clock, Exchange
from cai_apps.applications.diffusion.sampling.patches.layers import teach
from cai_apps.applications.diffusion.sampling.patches.strips import (
    Strips,
    halo_rows,
    moments,
    normalize,
    whole_moments,
)
from cai_apps.applications.diffusion.sampling.sampler import Sampler
from cai_apps.applications.diffusion.sampling.scheduler import Options, denoise, make_scheduler
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.run.train import train
from cai_mesh.errors import ConfigError, PlanError
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


def stale_layer(layer):
    """Two steps of one layer, the second stale: what it gives on this rank, and the bytes received."""
    strips, clock = Strips(2, dist.get_rank()), Clock(warmup=1)
    teach(layer, strips, lambda name: Exchange(name, dist.group.WORLD, clock))
    outs = []
    for x in two_steps(layer):
        clock.step += 1
        attends = not isinstance(layer, nn.Conv2d)
        outs.append(layer(strips.cut(x, 1 if attends else 2)))
    return outs, clock.nbytes


def two_steps(layer):
    generator = torch.Generator().manual_seed(3)
    shape = (2, 6, 5) if not isinstance(layer, nn.Conv2d) else (2, 3, 6, 5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]


def test_a_stale_convolution_reads_the_rows_of_the_step_before():
    torch.manual_seed(4)
    conv = nn.Conv2d(3, 4, 3, padding=1).double().requires_grad_(False)
    before, now = two_steps(conv)
    for rank, (outs, nbytes) in enumerate(run_ranks(2, stale_layer, conv)):
        mixed = before.clone()
        own = slice(3 * rank, 3 * rank + 3)
        mixed[:, :, own] = now[:, :, own]
        torch.testing.assert_close(outs[0], conv(before)[:, :, own])
        torch.testing.assert_close(outs[1], conv(mixed)[:, :, own])
        assert nbytes == 2 * (2 * 3 * 2 * 5) * 8  # two steps; pictures, channels, first and last row, width


def test_a_stale_attention_reads_the_keys_and_values_of_the_step_before():
    torch.manual_seed(4)
    attention = Attention(5, heads=1, dim_head=5)
    attention = attention.double().eval().requires_grad_(False)
    before, now = two_steps(attention)
    for rank, (outs, nbytes) in enumerate(run_ranks(2, stale_layer, attention)):
        mixed = before.clone()
        own = slice(3 * rank, 3 * rank + 3)
        mixed[:, own] = now[:, own]
        torch.testing.assert_close(outs[0], attention(before)[:, own])
        torch.testing.assert_close(outs[1], attention(mixed)[:, own])
        assert nbytes == 2 * 2 * (2 * 3 * 5) * 8  # two steps; keys and values; pictures, tokens, width


def test_moments_of_strips():
    norm = nn.GroupNorm(2, 4).double()
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64) + 1000 * torch.arange(6)[:, None]
    parts = [moments(part, 2) for part in x.chunk(3, 2)]
    for index, part in enumerate(x.chunk(3, 2)):
        found = normalize(part, norm, whole_moments(parts[index], parts, index))
        torch.testing.assert_close(found, norm(x).chunk(3, 2)[index])


def test_a_variance_below_zero_is_ones_own():
    fresh = torch.tensor([[[1.0]], [[3.0]]], dtype=torch.float64)
    remembered = [torch.tensor([[[0.0]], [[9.0]]], dtype=torch.float64), torch.zeros(2, 1, 1).double()]
    mean, variance = whole_moments(fresh, remembered, 0)
    assert (mean.item(), variance.item()) == (1.0, 2.0)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, stride=2),
        nn.Conv2d(2, 2, 3, padding=2, dilation=2),
    ],
)
def test_convolutions_that_cannot_work_on_strips_are_named(conv):
    with pytest.raises(PlanError, match="conv_in"):
        halo_rows(conv, "conv_in")


def refused():
    design, denoiser = built("sd-v1-tiny")
    split = split_denoiser(denoiser, dist.group.WORLD)
    with pytest.raises(ConfigError, match="a multiple of 4"):
        split.start(noise(design, 18, 16))
    with pytest.raises(ConfigError, match="mode"):
        split_denoiser(denoiser, dist.group.WORLD, mode="late")
    with pytest.raises(ConfigError, match="exact steps"):
        split_denoiser(denoiser, dist.group.WORLD, mode="stale", warmup=0)
    for change, words in ((nn.AvgPool2d(2), "AvgPool2d"), (nn.InstanceNorm2d(32), "InstanceNorm2d")):
        _, other = built("sd-v1-tiny")
        other.conv_norm_out = change
        with pytest.raises(PlanError, match=rf"(?s)conv_norm_out.*{words}"):
            split_denoiser(other, dist.group.WORLD)
    _, other = built("sd-v1-tiny")
    other.set_attn_processor(AttnProcessor())
    with pytest.raises(PlanError, match=r"(?s)attn1.*AttnProcessor2_0"):
        split_denoiser(other, dist.group.WORLD)
    _, dit = built("dit-tiny")
    with pytest.raises(ConfigError, match="square"):
        split_denoiser(dit, dist.group.WORLD).start(torch.zeros(1, 3, 16, 8))


def test_what_is_refused():
    run_ranks(2, refused)


def drawn(export, branches):
    """Latents of two prompts, alone and together."""
    sampler = Sampler(export, device="cpu", dtype=torch.float64)
    prompts, options = ["a red circle", "a blue square"], Options(steps=3)
    alone = sampler.latents(prompts, options)
    sampler.split(dist.group.WORLD, branches=branches)
    if branches:
        with pytest.raises(ConfigError, match="one prediction"):
            sampler.latents(prompts, Options(steps=3, guidance=1))
    return alone, sampler.latents(prompts, options)


def test_branches_of_an_odd_number_of_ranks():
    run_ranks(3, odd)


def odd():
    with pytest.raises(ConfigError, match="two halves"):
        open_branches(dist.group.WORLD)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("trained")
    changes = {
        "train.steps": 2,
        "train.global_batch": 4,
        "train.microbatch_size": 2,
        "train.device": "cpu",
        "precision.compute": "fp64",
        "data.samples": 40,
        "data.cache": str(tmp_path / "cache"),
        "log.directory": str(tmp_path / "runs"),
        "sampling.prompts": [],
    }
    return train(DIFFUSION, recipes.load("sd-v1-tiny", changes), label="patches").export


@pytest.mark.parametrize(("ranks", "branches"), [(2, False), (2, True), (4, True)])
def test_a_sampler_draws_together_with_guidance(trained, ranks, branches):
    for alone, together in run_ranks(ranks, drawn, trained, branches):
        assert alone.shape == together.shape
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
