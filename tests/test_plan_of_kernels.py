"""A plan for a GPU counts what kernels keep for backward, and not what plain torch would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from cai_apps import recipes
from cai_apps.applications.protein.task import PROTEIN
from cai_apps.planner.activations import saved_bytes
from cai_kernels import backend, plans_kernels

WITHOUT_TRITON = """
import importlib.util, sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find_spec(name, package)
sys.modules["triton"] = None
sys.path.insert(0, sys.argv[1])
from cai_kernels import why_not_triton
from test_plan_of_kernels import bytes_for, torch

assert "not installed" in why_not_triton(torch.device("cpu"))
print(bytes_for("cuda"))
"""


def bytes_for(kind: str) -> int:
    """Bytes that a small AlphaFold keeps for backward on a device of a kind."""
    changes = {"data.residues": 32, "parallel.shard": 1, "parallel.zero": 1, "precision.compute": "bf16"}
    config = PROTEIN.resolve(recipes.load("alphafold-tiny", changes | {"memory.recompute": "none"}), 1)
    return sum(saved_bytes(config, PROTEIN.workload(config), torch.device(kind)).kept.values())


def test_a_machine_without_triton_counts_the_kernels_of_a_gpu_elsewhere():
    command = [sys.executable, "-c", WITHOUT_TRITON, str(Path(__file__).parent)]
    counted = subprocess.run(command, capture_output=True, text=True)
    assert counted.stdout, counted.stderr
    assert int(counted.stdout) == bytes_for("cuda") < bytes_for("cpu")


def test_gpus_that_run_no_kernels_are_planned_without(monkeypatch):
    """Here as in a run: a machine's own GPUs count, of which some are too old for Triton."""
    monkeypatch.setattr(backend, "INSTALLED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plans_kernels()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, kernels in (((7, 5), False), ((8, 0), True)):
        monkeypatch.setattr(backend, "capability", lambda _, capability=capability: capability)
        assert plans_kernels() is kernels
    monkeypatch.setattr(backend, "INSTALLED", False)
    assert not plans_kernels()


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
