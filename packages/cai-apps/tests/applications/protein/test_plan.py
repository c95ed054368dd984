"""What a plan counts of AlphaFold."""

from __future__ import annotations

import torch

from cai_apps import recipes
from cai_apps.applications.protein.task import PROTEIN
from cai_apps.planner.activations import saved_bytes


def test_a_plan_for_a_gpu_counts_no_scores_of_attention():
    residues, blocks, heads = 64, 3, 4  # blocks with the one for extra sequences
    changes = {
        "data.residues": residues,
        "parallel.shard": 1,
        "parallel.zero": 1,
        "precision.compute": "bf16",
        "train.compile": "on",
        "memory.recompute": "none",
    }
    config = PROTEIN.resolve(recipes.load("alphafold-tiny", changes), 1)
    on_gpu, on_cpu = (
        sum(saved_bytes(config, PROTEIN.workload(config), torch.device(kind)).kept.values())
        for kind in ("cuda", "cpu")
    )
    scores = (
        2 * blocks * heads * residues**3 * config.train.microbatch_size * 2
    )  # of two triangle attentions, bf16
    assert on_gpu < on_cpu - scores
