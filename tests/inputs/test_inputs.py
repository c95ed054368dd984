"""Every bad input ends with exit code 2 and a message of what is wrong and what to do; nothing is left behind."""

from __future__ import annotations

import pytest
from bad_inputs import CASES, Case
from running import run

ALL = {f"{group}: {case.name}": case for group, cases in CASES.items() for case in cases}


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_is_told(case: Case, tmp_path):
    found = run(case, tmp_path)
    message = found.err
    assert "Traceback" not in message + found.out
    assert found.code == 2, message
    last = message[message.rindex("error: ") :]
    missing = [word for word in case.words if word.replace("{here}", str(tmp_path)) not in last]
    assert not missing, message
    assert "should not have happened" not in last
    assert any(f"  {label}:" in last for label in ("got", "expected", "cause", "fix")), message
    assert not {name for name in found.touched if not (case.started and name.startswith("run"))}


def test_there_are_many():
    assert len(ALL) == sum(map(len, CASES.values())) >= 150, "each has a name of its own"
