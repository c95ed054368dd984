"""A model that is sharded or offloaded first trains in accelerate, Trainer and Fabric as a plain one does there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from examples.launch import launched

SCRIPT = Path(__file__).with_name("handed_over.py")
FORMS = {"zero1": 2, "zero3": 2, "offload": 1}


@cache
def losses(library: str, form: str) -> list[float]:
    printed = launched([str(SCRIPT), library, form], FORMS.get(form, 1))
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", printed, re.M)]


CASES = [(library, form) for library in ("accelerate", "trainer", "fabric") for form in FORMS]
CASES.remove(("fabric", "offload"))  # the strategy is one of several processes, and offload is for one


@pytest.mark.parametrize(("library", "form"), CASES)
def test_losses_are_those_of_a_plain_model(library: str, form: str):
    wanted = losses(library, "plain")
    assert len(wanted) == 4
    assert losses(library, form) == pytest.approx(wanted, rel=2e-5)
