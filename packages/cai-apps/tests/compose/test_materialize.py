"""Initial values of a model of which this rank holds a part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cai_apps.compose.materialize import materialize
from cai_mesh.errors import PlanError
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
