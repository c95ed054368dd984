"""Schedules of learning rates, by numbers that their definitions give; and optimizers by their names."""

from __future__ import annotations

import math

import pytest
import torch

from cai_apps.compat.colossalai.absent import AbsentError
from cai_apps.compat.colossalai.nn import lr_scheduler, optimizer


def rates(name, steps, *args, **kwargs):
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = getattr(lr_scheduler, name)(adam, *args, **kwargs)
    found = []
    for _ in range(steps):
        found.append(adam.param_groups[0]["lr"])
        adam.step()
        schedule.step()
    assert schedule.get_last_lr() == [adam.param_groups[0]["lr"]]
    return found


def cosine(step, steps, floor=0.0):
    return floor + (1 - floor) * (1 + math.cos(math.pi * step / steps)) / 2


EXPECTED = {
    "CosineAnnealingLR": ((8,), {}, [cosine(step, 8) for step in range(8)]),
    "CosineAnnealingWarmupLR": (
        (8, 2),
        {"eta_min": 0.1},
        [0.5, 1.0, *(cosine(step, 6, 0.1) for step in range(6))],
    ),
    "LinearWarmupLR": ((8, 2), {}, [1 / 3, 2 / 3, *((8 - step) / 6 for step in range(2, 8))]),
    "MultiStepLR": ((8, [2, 4]), {}, [1, 1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01]),
    "MultiStepWarmupLR": ((8, 2, [4]), {}, [0.5, 1, 1, 1, 0.1, 0.1, 0.1, 0.1]),
    "PolynomialLR": ((4,), {"end_lr": 0.0, "power": 2.0}, [1, 9 / 16, 1 / 4, 1 / 16, 0, 0, 0, 0]),
    "PolynomialWarmupLR": ((6, 2), {"end_lr": 0.0}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
    "FlatAnnealingLR": ((8,), {"pct_start": 0.5}, [1, 1, 1, 1, *(cosine(step, 4) for step in range(4))]),
    "FlatAnnealingWarmupLR": (
        (8, 2),
        {"pct_start": 0.5},
        [0.5, 1, 1, 1, 1, *(cosine(step, 3) for step in range(3))],
    ),
    "StepLR": ((8, 4), {}, [1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1]),
    "ExponentialLR": ((8, 0.5), {}, [0.5**step for step in range(8)]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_rates(name):
    args, kwargs, expected = EXPECTED[name]
    assert rates(name, 8, *args, **kwargs) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["HybridAdam", "CPUAdam", "FusedAdam"])
def test_adam_steps_as_torchs_adamw(name):
    torch.manual_seed(0)
    weights = [torch.randn(5, 3) for _ in range(2)]
    ours, torchs = ([torch.nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    mine = getattr(optimizer, name)(ours, lr=1e-2, weight_decay=0.1)
    other = torch.optim.AdamW(torchs, lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        for pair in zip(ours, torchs, strict=True):
            gradient = torch.randn(5, 3)
            for param in pair:
                param.grad = gradient.clone()
        mine.step()
        other.step()
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "options", [{}, {"clip_threshold": 0.5}, {"decay_rate": -0.6}, {"lr": 0.5, "relative_step": False}]
)
def test_adafactor_steps_as_that_of_transformers(options):
    from transformers.optimization import Adafactor

    torch.manual_seed(0)
    weights = [torch.randn(5, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    pair = optimizer.Adafactor(ours, **options), Adafactor(theirs, **options)
    for _ in range(12):
        for params in zip(ours, theirs, strict=True):
            gradient = torch.randn_like(params[0])
            for param in params:
                param.grad = gradient.clone()
        for each in pair:
            each.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_optimizers_that_would_step_otherwise_say_so(caplog):
    param = [torch.nn.Parameter(torch.zeros(1))]
    for options in ({"weight_decay": 0.1}, {"lr": 1e-3}, {"relative_step": False}, {"beta1": 0.9}):
        with pytest.raises(AbsentError, match="Adafactor"):
            optimizer.Adafactor(param, **options)
    optimizer.Lamb(param)
    assert "moments are corrected" in caplog.text


def test_what_is_not_here_is_named_with_what_to_write():
    param = [torch.nn.Parameter(torch.zeros(1))]
    with pytest.raises(AbsentError, match=r"torch\.optim\.Adam\("):
        optimizer.HybridAdam(param, adamw_mode=False, weight_decay=0.1)
    with pytest.raises(AbsentError, match="nvme"):
        optimizer.HybridAdam(param, nvme_offload_fraction=0.5)
    with pytest.raises(ImportError, match="GaLore itself is not here"):
        from cai_apps.compat.colossalai.nn.optimizer import GaLoreAdamW8bit  # noqa: F401
    with pytest.raises(AttributeError, match="did you mean 'HybridAdam'"):
        _ = optimizer.HybridAdm
