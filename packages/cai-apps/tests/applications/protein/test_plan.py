"""What a plan counts of AlphaFold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cai_apps import recipes
from cai_apps.applications.protein.task import PROTEIN
from cai_apps.planner.activations import saved_bytes


def config_of(**more: Any) -> Any:
    changes = {"parallel.shard": 1, "parallel.zero": 1, "memory.recompute": "none", **more}
    return PROTEIN.resolve(recipes.load("alphafold-tiny", changes), 1)


@pytest.mark.parametrize("compiled", ["on", "off"])
def test_rounds_without_gradients_keep_nothing(compiled):
    one, two = (
        saved_bytes(config, PROTEIN.workload(config), torch.device("cpu"))
        for config in (
            config_of(**{"objective.rounds": rounds, "data.residues": 16, "train.compile": compiled})
            for rounds in (1, 2)
        )
    )
    assert one.products == two.products
    assert one.attention == two.attention
    assert one.inputs == two.inputs
    assert sum(two.kept.values()) == pytest.approx(sum(one.kept.values()), rel=0.01)
