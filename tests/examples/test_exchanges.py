"""A model that is changed after it was cut or sharded trains as the whole one does, or says that it cannot."""

from __future__ import annotations

from functools import cache

import pytest
from examples.exchanges import CHANGES, FORMS, build, losses, outcomes

from cai_mesh.testing import RankGroup

RIGHT = {
    "tensor": {"another head", "another layer", "a bottleneck", "a value head", "a frozen probe"},
    "sequence": {"a frozen probe"},
    "zero3": {"a frozen probe"},
}
"""The others are refused: parts would be taken for wholes, or gradients not summed."""

SAYS = (
    *("after it was cut or sharded", "something whole", "another shape", "another tensor was put in"),
    "used outside its block",
)


@pytest.fixture(scope="module")
def found():
    group = RankGroup(2)
    return {form: group.run(outcomes, form) for form in FORMS}


@cache
def plain(change):
    return losses(build(), "plain", CHANGES[change])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", FORMS)
def test_a_changed_model_is_right_or_refused(form, change, found):
    for outcome in (result[change] for result in found[form]):
        if change in RIGHT[form]:
            assert outcome == pytest.approx(plain(change), rel=2e-5)
        else:
            assert any(says in outcome for says in SAYS)
