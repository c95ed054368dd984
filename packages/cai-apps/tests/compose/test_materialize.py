"""Initial values of a model of which this rank holds a part."""

from __future__ import annotations

import pytest
import torch
from layouts import Case, session_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from cai_apps.compose.materialize import InitialValues, materialize
from cai_mesh.errors import PlanError
from cai_mesh.testing import run_ranks
from cai_pipeline.stages.boundary import StageIO
from cai_pipeline.stages.placeholders import PlaceholderPassThrough


class Embeddings(nn.Module):
    """Its initialization looks into a child, as SigLIP's does, which another stage may have."""

    def __init__(self, child: nn.Module, own: bool):
        super().__init__()
        self.child = child
        if own:
            self.scale = nn.Parameter(torch.empty(3))


def initializer(model: nn.Module):
    def initialize(module: nn.Module) -> None:
        if isinstance(module, Embeddings):
            nn.init.ones_(module.child.weight)
        elif isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 2.0)

    return initialize


def model(child: nn.Module, own: bool = False) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(Embeddings(child, own), nn.Linear(2, 2, bias=False))


def made(of: nn.Module) -> nn.Module:
    return materialize(of, initializer, seed=0, dtype=torch.float32, device=torch.device("cpu"))


def elsewhere() -> nn.Module:
    return PlaceholderPassThrough(nn.Identity(), StageIO())


def test_what_is_wholly_on_another_stage_is_passed_over() -> None:
    found = made(model(elsewhere()))
    assert torch.equal(found[1].weight, torch.full((2, 2), 2.0))


@pytest.mark.parametrize(("child", "own"), [(elsewhere(), True), (nn.Identity(), False)])
def test_what_has_values_here_is_refused(child: nn.Module, own: bool) -> None:
    """So is what has none anywhere: nobody knows what its initialization would have filled."""
    with pytest.raises(PlanError, match="does not run on a part"):
        made(model(child, own=own))


def elements_alive(zero: int) -> tuple[int, int]:
    """How many elements that were made are there at once while a session is built, and how many are made in all."""
    made, alive, make = [], [], InitialValues.make

    def watched(self, group):
        full = make(self, group)
        made.extend((StorageWeakRef(value.untyped_storage()), value.numel()) for value in full.values())
        alive.append(sum(size for storage, size in made if not storage.expired()))
        return full

    InitialValues.make = watched
    try:
        session_of("llama", Case(data=2, zero=zero), "fp32")
    finally:
        InitialValues.make = make
    return max(alive), sum(size for _, size in made)


def test_in_stage_3_no_rank_has_more_than_a_block_in_full():
    """Of four blocks, an embedding and an output layer."""
    for most, total in run_ranks(2, elements_alive, 3):
        assert most < total / 3, (most, total)
    for most, total in run_ranks(2, elements_alive, 1):
        assert most == total
