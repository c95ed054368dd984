"""A plan for a GPU counts what kernels keep for backward, and not what plain torch would."""

from __future__ import annotations

import torch

from cai_apps import recipes
from cai_apps.applications.protein.task import PROTEIN
from cai_apps.planner.activations import saved_bytes


def test_attention_of_proteins_keeps_no_scores():
    residues, blocks, heads = 64, 3, 4  # blocks with the one for extra sequences
    changes = {
        "data.residues": residues,
        "parallel.shard": 1,
        "parallel.zero": 1,
        "precision.compute": "bf16",
        "train.compile": "on",
        "memory.recompute": "none",
        "objective.rounds": 1,
    }
    config = PROTEIN.resolve(recipes.load("alphafold-tiny", changes), 1)
    on_gpu, on_cpu = (
        sum(saved_bytes(config, PROTEIN.workload(config), torch.device(kind)).kept.values())
        for kind in ("cuda", "cpu")
    )
    # of two triangle attentions a block, in bf16
    scores = 2 * blocks * heads * residues**3 * config.train.microbatch_size * 2
    assert on_gpu < on_cpu - scores
