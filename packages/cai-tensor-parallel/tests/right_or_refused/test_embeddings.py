"""An embedding cut by vocabulary: every option is right or refused, and ids outside raise as they do whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cut_cases import Noisy
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import Plan, parallelize, vocab_start

ROWS = 7
PLAN = Plan({"0": "vocab_embedding"})
KINDS = {
    "plain": {},
    "padding": {"padding_idx": 5},
    "negative padding": {"padding_idx": -1},
    "sparse": {"sparse": True},
    "max norm": {"max_norm": 0.5},
    "frequencies": {"scale_grad_by_freq": True},
}
REFUSED = {"max norm": "max_norm", "frequencies": "scale_grad_by_freq"}


def table(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, 4, dtype=torch.float64, **KINDS[kind]))


def looked_up(kind):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole, cut = table(kind), table(kind)
    if kind in REFUSED:
        with pytest.raises(PlanError, match=REFUSED[kind]):
            parallelize(cut, mesh, PLAN)
        assert cut[0].weight.shape == whole[0].weight.shape
        return
    parallelize(cut, mesh, PLAN)
    ids = torch.tensor([[0, 5, 5], [6, 3, 2]])
    y, expected = cut(ids), whole(ids)
    torch.testing.assert_close(y, expected)
    for each in (y, expected):
        each.square().sum().backward()
    got, wanted = cut[0].weight.grad, whole[0].weight.grad
    assert got.is_sparse == wanted.is_sparse
    start = vocab_start(cut[0].weight)
    got, wanted = (g.to_dense() if g.is_sparse else g for g in (got, wanted))
    torch.testing.assert_close(got, wanted[start : start + len(got)])


@pytest.mark.parametrize("kind", list(KINDS))
def test_options(kind):
    run_ranks(2, looked_up, kind)


def outside(rows, wrong):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize(nn.Sequential(nn.Embedding(rows, 4)), mesh, PLAN)
    with pytest.raises(IndexError):
        model(torch.tensor([0, wrong, 1]))
    return model(torch.tensor([0, 1])).shape


@pytest.mark.parametrize(("world", "rows"), [(2, 7), (4, 5)])
@pytest.mark.parametrize("wrong", [-1, -100, "rows", 1000])
def test_ids_outside_the_vocabulary_raise_on_every_rank(world, rows, wrong):
    assert len(run_ranks(world, outside, rows, rows if wrong == "rows" else wrong)) == world


def more_than_a_lookup():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(Noisy(ROWS, 4))
    with pytest.raises(PlanError, match="more than a lookup"):
        parallelize(model, mesh, PLAN)
    assert model[0].weight.shape == (ROWS, 4)
    tied = nn.Sequential(nn.Embedding(ROWS, 4), nn.Linear(4, ROWS))
    tied[1].weight = tied[0].weight
    with pytest.raises(PlanError, match="shared"):
        parallelize(tied, mesh, PLAN)


def test_what_is_more_than_a_lookup_is_refused():
    run_ranks(2, more_than_a_lookup)
