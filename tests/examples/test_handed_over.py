"""A model that is sharded or offloaded first trains in accelerate, Trainer and Fabric as a plain one does there."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path

import pytest
from examples.launch import launched

SCRIPT = Path(__file__).with_name("handed_over.py")
FORMS = {"zero1": 2, "zero3": 2, "offload": 1}
RESUMED = {**FORMS, "zero1-bf16": 1}


FOLDER = tempfile.TemporaryDirectory()


@cache
def losses(library: str, form: str, resumed: str = "") -> list[float]:
    """What a run prints. Trainer saves, and a resumed one goes on from what the first one has saved."""
    words = [str(Path(FOLDER.name) / form), *([resumed] if resumed else [])] if library == "trainer" else []
    printed = launched([str(SCRIPT), library, form, *words], FORMS.get(form, 1))
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", printed, re.M)]


CASES = [(library, form) for library in ("accelerate", "trainer", "fabric") for form in FORMS]
CASES.remove(("fabric", "offload"))  # the strategy is one of several processes, and offload is for one


@pytest.mark.parametrize(("library", "form"), CASES)
def test_losses_are_those_of_a_plain_model(library: str, form: str):
    wanted = losses(library, "plain")
    assert len(wanted) == 4
    assert losses(library, form) == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize("form", RESUMED)
def test_trainer_resumes_what_was_handed_over_and_loads_the_best(form: str):
    """Bit for bit; the loss with the weights of the best checkpoint is printed last."""
    whole = losses("trainer", form)
    *resumed, best = losses("trainer", form, "2")
    assert len(whole) == 4
    assert resumed == whole[2:]
    losses("trainer", "plain")
    *_, wanted = losses("trainer", "plain", "2")
    assert best == pytest.approx(wanted, rel=2e-5 if form in FORMS else 2e-3)
