"""Models whose blocks return, hold and use what blocks of real models do train as plain ones, or are refused.

As in tests/loops: two ranks that share a batch, or one under offload, against a plain twin in float64.
"""

from __future__ import annotations

from functools import cache

import pytest
from layers.models import MODELS
from layers.table import FORMS, REFUSED, trained
from loops.kit import RANKS, judged

from cai_mesh.testing import RankGroup


@cache
def wanted(name):
    verdict, result = trained(name, "plain")
    assert verdict == "done", result
    return result


@pytest.fixture(scope="module")
def ranks():
    """The ranks of all cases that need some, each after another."""
    return RankGroup(RANKS, timeout=60)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_right_or_refused(name, form, ranks):
    expected = REFUSED.get((name, form), "")
    if form == "offload":
        found = [trained(name, form)]
    else:
        found = ranks.run(trained, name, form)
    for each in found:
        verdict, why = judged(each, wanted(name))
        assert verdict == ("refused" if expected else "right"), why
        assert expected in why
