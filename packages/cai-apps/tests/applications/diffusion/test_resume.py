"""A run that goes on from a checkpoint on another layout ends as one that was never stopped, averages included."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from cai_apps import recipes
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.run.train import train


def run(directory: Path, cache: Path, steps: int, ranks: int, zero: int, **more) -> Path:
    """The export of a run of six steps at most."""
    changes = {
        "train.steps": steps,
        "train.global_batch": 8,
        "train.microbatch_size": 2,
        "train.device": "cpu",
        "lr_schedule.decay_steps": 4,
        "precision.compute": "fp64",
        "data.samples": 40,
        "data.cache": str(cache),
        "parallel.shard": ranks,
        "parallel.zero": zero,
        "log.directory": str(directory),
        "sampling.prompts": [],
        **more,
    }
    return train(DIFFUSION, recipes.load("sd-v1-tiny", changes), label="resume").export


def weights(export: Path) -> dict[str, torch.Tensor]:
    files = sorted(export.rglob("*.safetensors"))
    return {f"{file.relative_to(export)}:{n}": v for file in files for n, v in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_resumes_on_another_layout(tmp_path):
    cache = tmp_path / "cache"
    whole = weights(run(tmp_path / "whole", cache, 4, 1, 1))
    run(tmp_path / "parts", cache, 1, 1, 0)
    run(tmp_path / "parts", cache, 2, 2, 3)
    run(tmp_path / "parts", cache, 3, 1, 1, **{"parallel.tensor.size": 2})
    assert_same(weights(run(tmp_path / "parts", cache, 4, 2, 3)), whole)
    assert any(name.startswith("raw/unet") for name in whole)
    changed = (
        name
        for name in whole
        if name.startswith("unet/") and not torch.equal(whole[name], whole[f"raw/{name}"])
    )
    assert any(changed), "averaged weights differ from the last ones"


def test_an_average_begins_where_the_checkpoint_has_none(tmp_path):
    cache, directory = tmp_path / "cache", tmp_path / "run"
    without = run(directory, cache, 2, 1, 1, **{"optimizer.ema_decay": None})
    assert not (without / "raw").exists()
    last = weights(without)
    after = weights(run(directory, cache, 3, 1, 1))
    name = next(name for name in last if name.endswith("conv_in.weight"))
    decay = min(0.99, 4 / 13)  # of the third step
    expected = decay * last[name] + (1 - decay) * after[f"raw/{name}"]
    torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-6)
