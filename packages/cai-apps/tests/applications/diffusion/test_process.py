"""Noise, targets, weights and losses beside the papers' formulas written out, and beside diffusers' schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

from cai_apps.applications.diffusion.data.samples import draw
from cai_apps.applications.diffusion.model.noise_process import Diffusing, Flowing, process_of, squared_error
from cai_apps.applications.diffusion.training.variance import StepBounds
from cai_mesh.errors import ConfigError

DDPM = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def image_and_noise() -> tuple[torch.Tensor, torch.Tensor]:
    x = some(8, 3, 4, 4)
    return x, some(3, 4, 4, 8).permute(3, 0, 1, 2).contiguous()


def kept_by_hand() -> list[float]:
    """Products of 1 - beta, beta linear in its root (Rombach et al.)."""
    first, last = math.sqrt(0.00085), math.sqrt(0.012)
    kept, product = [], 1.0
    for step in range(1000):
        product *= 1 - (first + (last - first) * step / 999) ** 2
        kept.append(product)
    return kept


def test_noise_comes_in_by_the_formula_and_as_diffusers_adds_it():
    x, noise = image_and_noise()
    time = torch.tensor([0, 1, 10, 100, 500, 900, 998, 999])
    process = process_of(DDPM)
    found = process.mix(x, noise, time)
    kept = kept_by_hand()
    for sample, step in enumerate(time.tolist()):
        mixed = math.sqrt(kept[step]) * x[sample] + math.sqrt(1 - kept[step]) * noise[sample]
        torch.testing.assert_close(found[sample], mixed, rtol=1e-4, atol=1e-6)
    made = DDPMScheduler.from_config(DDPM)
    torch.testing.assert_close(found, made.add_noise(x, noise, time), rtol=1e-6, atol=1e-6)
    assert torch.equal(process.target(x, noise, time), noise)
    v = process_of(DDPM | {"prediction_type": "v_prediction"})
    torch.testing.assert_close(
        v.target(x, noise, time), made.get_velocity(x, noise, time), rtol=1e-6, atol=1e-6
    )


def test_times_are_all_steps_alike():
    times = process_of(DDPM).time(torch.arange(4000, dtype=torch.float64).add(0.5) / 4000)
    assert torch.bincount(times, minlength=1000).tolist() == [4] * 1000
    assert process_of(DDPM).time(torch.tensor([1.0], dtype=torch.float64)).tolist() == [999]


@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_by_the_formula(gamma):
    time, kept = torch.arange(0, 1000, 37), kept_by_hand()
    ratios = [kept[step] / (1 - kept[step]) for step in time.tolist()]
    epsilon = process_of(DDPM, min_snr=gamma).weight(time)
    assert epsilon.tolist() == pytest.approx([min(r, gamma) / r for r in ratios], rel=1e-4)
    v = process_of(DDPM | {"prediction_type": "v_prediction"}, min_snr=gamma).weight(time)
    assert v.tolist() == pytest.approx([min(r, gamma) / (r + 1) for r in ratios], rel=1e-4)
    assert process_of(DDPM).weight(time).tolist() == [1.0] * len(time)


def test_min_snr_where_nothing_of_the_image_is_left():
    kept = torch.tensor([0.5, 0.0], dtype=torch.float64)
    time = torch.tensor([0, 1])
    assert Diffusing(kept, "epsilon", 5.0).weight(time).tolist() == [1.0, 1.0]
    assert Diffusing(kept, "v", 5.0).weight(time).tolist() == [0.5, 0.0]


def test_a_flow_is_a_straight_line_as_in_diffusers():
    x, noise = image_and_noise()
    process = process_of(FLOW)
    u = torch.linspace(0.05, 0.95, 8, dtype=torch.float64)
    time = process.time(u)
    levels = [3 * each / (1 + 2 * each) for each in u.tolist()]
    assert time.tolist() == pytest.approx([1000 * level for level in levels], rel=1e-6)
    found = process.mix(x, noise, time)
    for sample, level in enumerate(levels):
        torch.testing.assert_close(
            found[sample], (1 - level) * x[sample] + level * noise[sample], rtol=1e-6, atol=1e-6
        )
    assert torch.equal(process.target(x, noise, time), noise - x)
    assert process.weight(time).tolist() == [1.0] * 8
    made = FlowMatchEulerDiscreteScheduler.from_config(FLOW)
    known = made.timesteps[[0, 250, 500, 999]]
    mixed = process.mix(x[:4], noise[:4], known)
    torch.testing.assert_close(mixed, made.scale_noise(x[:4], known, noise[:4]), rtol=1e-5, atol=1e-5)


def test_logit_normal_times_have_that_distribution():
    process = Flowing(1000, 1.0, logit_normal=True)
    u = (torch.arange(10001, dtype=torch.float64) + 0.5) / 10001
    levels = process.time(u).double() / 1000
    logits = torch.logit(levels)
    assert float(logits.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(logits.std()) == pytest.approx(1.0, abs=1e-3)
    inside = ((levels > 0.25) & (levels < 0.75)).double().mean()
    assert float(inside) == pytest.approx(math.erf(math.log(3) / math.sqrt(2)), abs=1e-3)


def test_squared_error_is_summed_over_samples_and_weighted():
    output, target, weight = (
        some(3, 2, 2, 2),
        some(2, 2, 2, 3).permute(3, 0, 1, 2),
        torch.tensor([1.0, 0.5, 0.0]),
    )
    total = 0.0
    for sample in range(3):
        squares = [
            (a - b) ** 2 for a, b in zip(output[sample].flatten(), target[sample].flatten(), strict=True)
        ]
        total += float(weight[sample]) * float(sum(squares)) / len(squares)
    assert float(squared_error(output, target, weight)) == pytest.approx(total, rel=1e-12)
    half = squared_error(output.half(), target.half(), weight)
    assert half.dtype == torch.float32


def test_the_bound_of_a_learned_variance_step_by_step():
    """KL(q(x_{t-1} | x_t, x_0) || p) of Nichol and Dhariwal, with normal distributions of torch."""
    kept = torch.tensor(kept_by_hand(), dtype=torch.float64)[::50].clone()
    x = some(4, 1, 2, 2).clamp(-1, 1)
    noise, v = some(2, 2, 1, 4).permute(3, 2, 0, 1).contiguous(), some(4, 2, 2, 1).permute(0, 3, 1, 2).tanh()
    time = torch.tensor([1, 2, 10, 19])
    process = Diffusing(kept, "epsilon")
    true = some(4, 1, 1, 2).expand(4, 1, 2, 2).contiguous()
    noisy = process.mix(x, true, time)
    found = StepBounds(kept).loss(noise, v, x, noisy, time)
    for sample, step in enumerate(time.tolist()):
        now, before = float(kept[step]), float(kept[step - 1])
        beta = 1 - now / before
        least = beta * (1 - before) / (1 - now)
        on_x, on_noisy = math.sqrt(before) * beta / (1 - now), math.sqrt(1 - beta) * (1 - before) / (1 - now)
        guess = (noisy[sample] - math.sqrt(1 - now) * noise[sample]) / math.sqrt(now)
        log_variance = (v[sample] + 1) / 2 * math.log(beta) + (1 - (v[sample] + 1) / 2) * math.log(least)
        q = torch.distributions.Normal(on_x * x[sample] + on_noisy * noisy[sample], math.sqrt(least))
        p = torch.distributions.Normal(on_x * guess + on_noisy * noisy[sample], (log_variance / 2).exp())
        bits = torch.distributions.kl_divergence(q, p).mean() / math.log(2)
        assert float(found[sample]) == pytest.approx(float(bits), rel=1e-9)


def test_noise_is_standard_normal_and_a_function_of_seed_purpose_and_place():
    like = torch.empty(64, 4, 16, 16, dtype=torch.float64)
    place = torch.arange(64) + 1000
    noise = draw(like, place, 3, "noise")
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(noise.var()) == pytest.approx(1.0, abs=0.02)
    assert float((noise**4).mean()) == pytest.approx(3.0, abs=0.1)
    assert torch.equal(draw(like[:5], place[10:15], 3, "noise"), noise[10:15])
    for other in (
        draw(like, place, 4, "noise"),
        draw(like, place, 3, "offset"),
        draw(like, place + 64, 3, "noise"),
    ):
        assert abs(float((other * noise).mean())) < 0.02


@pytest.mark.parametrize(
    ("scheduler", "options", "words"),
    [
        (FLOW, {"min_snr": 5.0}, "does nothing for a flow"),
        (DDPM, {"logit_normal": True}, "is for flows"),
        (FLOW | {"use_dynamic_shifting": True}, {}, "depends on the size"),
        ({"_class_name": "NoSuchScheduler"}, {}, "does not know"),
        ({"_class_name": "EDMEulerScheduler"}, {}, "no noise in steps"),
    ],
)
def test_what_has_no_meaning_is_refused(scheduler, options, words):
    with pytest.raises(ConfigError, match=words):
        process_of(scheduler, **options)
