"""Ranks that were built from other seeds begin with the first one's values, also where sums are equal."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from cai_apps.booster.alike import make_alike
from cai_mesh.testing import run_ranks


def begin() -> tuple[dict[str, torch.Tensor], bool]:
    """A model whose order of rows is a permutation that each rank draws by itself."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    model.register_buffer("order", torch.randperm(64))
    model.register_buffer("shuffled", torch.arange(64.0)[torch.randperm(64)])
    model.register_buffer("alike", torch.ones(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    make_alike(model, mesh, torch.device("cpu"))
    after = model.state_dict()
    return {name: value.clone() for name, value in after.items()}, all(
        map(torch.equal, before.values(), after.values())
    )


def test_values_that_differ_become_the_first_ranks():
    (first, is_kept), (second, _) = run_ranks(2, begin)
    assert is_kept
    assert all(torch.equal(first[name], second[name]) for name in first)
