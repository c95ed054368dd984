"""Loops as people write them train as a plain loop does on the whole batch, in every stage, or are refused.

Every case runs on two ranks that share a batch, or on one under offload, and is compared with the plain loop: what it
saw on the way, and every weight at the end, in float64.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch
from loops import kept_gradients, loops_of_others, shapes  # noqa: F401 (their cases are in the table)
from loops.cases import CASES, REFUSED
from loops.kit import RANKS, STAGES, Start, adamw, built, judged, outcome
from loops.misuse import MISUSES
from loops.page import PAGE, text

from cai_mesh.testing import RankGroup
from cai_zero import MixedPrecision

WRITES_IN_PLACE = (
    "decay_groups_by_dimension",
    "noise_of_the_shape",
    "rows_are_written",
    "rows_are_filled",
    "a_mask_kept",
    "a_vector_of_all_and_back",
    "weights_made_anew",
    "weights_clamped_without_grad",
    "written_after_a_forward_without_backward",
    "towards_flat_minima",
)
"""Not through `param.data`: which elements were written to cannot be told from the other half."""


@cache
def wanted(name):
    verdict, result = outcome(CASES[name], "plain")
    assert verdict == "done", result
    return result


@pytest.fixture(scope="module")
def ranks():
    """The ranks of all cases that need some, each after another."""
    return RankGroup(RANKS, timeout=60)


def on_a_rank(name, stage):
    return outcome(CASES[name], stage)


def verdicts(name, stage, ranks):
    if stage == "offload":
        return [outcome(CASES[name], stage)]
    return ranks.run(on_a_rank, name, stage)


def on_every_stage():
    """Every loop on every stage: always where it is refused and on one stage in four, by turns; else in the matrix."""
    for place, name in enumerate(CASES):
        for index, stage in enumerate(STAGES):
            always = (name, stage) in REFUSED or (place + index) % 4 == 0
            yield pytest.param(name, stage, marks=[] if always else [pytest.mark.matrix])


@pytest.mark.parametrize(("name", "stage"), on_every_stage())
def test_a_loop_is_right_or_refused(name, stage, ranks):
    expected = REFUSED.get((name, stage), "")
    for found in verdicts(name, stage, ranks):
        verdict, why = judged(found, wanted(name))
        assert verdict == ("refused" if expected else "right"), why
        assert expected in why


def on_a_rank_in_halves(name):
    """The loop in bfloat16, with whole master weights and with those in halves."""
    whole = MixedPrecision(compute=torch.bfloat16)
    return [
        outcome(CASES[name], "zero1", precision=precision)
        for precision in (whole, replace(whole, split_master=True))
    ]


def by_turns():
    """Every loop: one in three, and those that write in place; the others in the matrix."""
    for place, name in enumerate(CASES):
        always = name in WRITES_IN_PLACE or place % 3 == 0
        yield pytest.param(name, marks=[] if always else [pytest.mark.matrix])


@pytest.mark.parametrize("name", by_turns())
def test_with_master_weights_in_halves_it_is_that_with_whole_ones_or_refused(name, ranks):
    for whole, halves in ranks.run(on_a_rank_in_halves, name):
        if whole[0] == "done":  # a weight halfway between two in bfloat16 may be the other one
            verdict, why = judged(halves, whole[1], close=2e-3)
            assert verdict == ("refused" if name in WRITES_IN_PLACE else "right"), why
            assert name not in WRITES_IN_PLACE or "a parameter was changed in place" in why
        else:
            assert halves == whole


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "residency"])
@pytest.mark.parametrize("name", ["torchs_clip", "frozen_at_first_and_trained_later"])
def test_a_model_that_nobody_holds_is_free_again(name, stage):
    loop = CASES[name]

    def trained():
        run = built(stage, adamw, getattr(loop, "start", Start()))
        held = [*run.model.parameters(), run.model, run.optimizer]
        loop(run)
        getattr(run.optimizer, "wait", lambda: None)()
        return [weakref.ref(each) for each in held]

    refs = trained()
    gc.collect()
    assert [type(ref()) for ref in refs if ref() is not None] == []


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_named_on_every_rank(name, ranks):
    _, count, says = MISUSES[name]
    assert count in (1, RANKS)
    for error in ranks.run(refused, name) if count > 1 else [refused(name)]:
        assert says in error


def refused(name):
    from cai_mesh.errors import CaiError

    try:
        MISUSES[name][0]()
    except CaiError as error:
        return str(error)
    return "nothing was raised"


def test_the_page_is_that_of_the_tables():
    assert PAGE.read_text() == text(), "run python tests/loops/page.py"
