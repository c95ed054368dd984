"""A run that goes on from a checkpoint ends as one that was never stopped, averages included; and FLOPs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from cai_apps import recipes
from cai_apps.applications.protein.data.batch import features_of
from cai_apps.applications.protein.design import sizes_for
from cai_apps.applications.protein.flops import forward_flops
from cai_apps.applications.protein.task import PROTEIN
from cai_apps.applications.protein.workload import workload
from cai_apps.run.train import train


def run(directory: Path, cache: Path, steps: int, ranks: int, zero: int, compute: str = "fp64") -> Path:
    """The export of a run of four steps at most."""
    changes = {
        "train.steps": steps,
        "train.global_batch": 2,
        "train.device": "cpu",
        "lr_schedule.decay_steps": 4,
        "precision.compute": compute,
        "parallel.shard": ranks,
        "parallel.zero": zero,
        "data.residues": 20,
        "data.sequences": 4,
        "data.extra": 5,
        "data.cache": str(cache),
        "objective.rounds": 3,
        "folding.chains": [],
        "log.directory": str(directory),
    }
    return train(PROTEIN, recipes.load("alphafold-tiny", changes), label="resume").export


def weights(export: Path) -> dict[str, torch.Tensor]:
    files = sorted(export.rglob("*.safetensors"))
    return {f"{file.relative_to(export)}:{n}": v for file in files for n, v in load_file(file).items()}


def test_resumes_on_another_layout(tmp_path):
    cache = tmp_path / "cache"
    whole = weights(run(tmp_path / "whole", cache, 4, 1, 1))
    run(tmp_path / "parts", cache, 2, 1, 0)
    run(tmp_path / "parts", cache, 3, 2, 3)
    found = weights(run(tmp_path / "parts", cache, 4, 1, 2))
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)
    changed = (not torch.equal(v, whole[f"raw/{n}"]) for n, v in whole.items() if not n.startswith("raw/"))
    assert any(changed), "averaged weights differ from the last ones"


def test_resumes_bit_for_bit_on_the_same_layout(tmp_path):
    cache = tmp_path / "cache"
    whole = weights(run(tmp_path / "whole", cache, 4, 1, 1, "bf16"))
    run(tmp_path / "parts", cache, 3, 1, 1, "bf16")
    found = weights(run(tmp_path / "parts", cache, 4, 1, 1, "bf16"))
    assert all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.parametrize("templates", [0, 2])
def test_flops_are_those_of_the_products(templates):
    changes = {"data.residues": 96, "data.sequences": 32, "data.extra": 64, "data.templates": templates}
    config = recipes.load("alphafold-tiny", changes | {"objective.rounds": 1})
    made = workload(config)
    with torch.device("meta"):
        model, batch = made.build().eval(), made.example(1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.round(features_of(batch)[0], None)
    expected = forward_flops(sizes_for(config), 96, 32, 64, templates)
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.1)
