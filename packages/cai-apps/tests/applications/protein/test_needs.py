"""What a fold will need is said before it starts, and refused where it is more than there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from cai_apps.applications.protein.data.sequences import Alignment
from cai_apps.applications.protein.design import sizes_of
from cai_apps.applications.protein.fold import Options, features_of_rounds, fold
from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_apps.applications.protein.needs import Needs, check_needs, needs_of
from cai_mesh.errors import PlanError

OPTIONS = Options(rounds=2, sequences=8, extra=8)


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    return AlphaFold(sizes_of("alphafold-tiny", templates=False, errors=True)).eval()


def alignment(residues: int, sequences: int = 16) -> Alignment:
    numbers = np.random.default_rng(0).integers(0, 20, (sequences, residues)).astype(np.uint8)
    return Alignment(tuple(map(str, range(sequences))), numbers, np.zeros((sequences, residues), np.uint16))


@torch.no_grad()
@pytest.mark.parametrize("residues", [24, 48])
def test_needs_are_those_of_a_fold(model, residues):
    needs = needs_of(model, alignment(residues), OPTIONS, (), "cpu")
    rounds = features_of_rounds(model, alignment(residues), OPTIONS)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model(rounds)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert needs.total == pytest.approx(peak, rel=0.2)


def test_needs_grow_with_the_chain_and_nothing_is_computed(model):
    small, large = (needs_of(model, alignment(n), OPTIONS, (), "cpu") for n in (64, 20_000))
    assert small.weights == large.weights
    assert large.rest > 10_000 * small.rest
    fold(model, "x", alignment(12), replace(OPTIONS, rounds=1))  # tables are still those with values


def test_more_than_there_is_is_refused():
    what = "9 residues"
    assert "about 3.00 GiB" in check_needs("x", Needs(2**30, 2**31), 2**33, what)
    with pytest.raises(PlanError, match="folding x takes more memory than there is"):
        check_needs("x", Needs(2**30, 2**31), 2**31, what)
    assert "are free" not in check_needs("x", Needs(1, 1), None, what)
