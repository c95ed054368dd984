"""What `test_inputs` asserts, of further inputs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from bad_inputs import Case
from further_cases import ALONE, FURTHER
from hostile_cases import HOSTILE
from running import run

SHOWN = 120
"""Letters of a test's name."""
STEERING = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]"
"""What steers a terminal."""
REPEATED, BRIEF = r"(.)\1{20,}", r"\1..."
"""A letter many times over, and what is shown of it."""


def _named(groups: dict[str, list[Case]], kind: str = "") -> dict[str, Case]:
    """Cases by group, number, what is made and what is given."""
    return {
        f"{kind}{group} {number}: {_brief(case)}": case
        for group, cases in groups.items()
        for number, case in enumerate(cases, 1)
    }


def _brief(case: Case) -> str:
    made = f"({case.files.__name__}) " if case.files else ""
    return re.sub(REPEATED, BRIEF, made + case.name)[:SHOWN]


NAMED, APART = _named(FURTHER) | _named(HOSTILE, "hostile "), _named(ALONE)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED)
def test_is_told(case: Case, tmp_path):
    found = run(case, tmp_path)
    message = found.err
    assert "Traceback" not in message + found.out
    assert not re.search(STEERING, message + found.out)
    assert found.code == 2, message or found.out[-500:]
    last = message[message.rindex("\nerror: ") if "\nerror: " in message else 0 :]
    assert "should not have happened" not in last
    missing = [word for word in case.words if word.replace("{here}", str(tmp_path)) not in last]
    assert not missing, message
    assert any(f"  {label}:" in last for label in ("got", "expected", "cause", "fix")), message
    assert not {name for name in found.touched if not (case.started and name.startswith("run"))}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", APART.values(), ids=APART)
def test_is_told_in_a_process_of_its_own(case: Case, tmp_path):
    if case.files is not None:
        case.files(tmp_path)
    arguments = [argument.replace("{here}", str(tmp_path)) for argument in case.arguments]
    command = [sys.executable, "-m", "cai_apps", *arguments]
    told = subprocess.run(
        command, cwd=tmp_path, env=os.environ | case.environment, capture_output=True, text=True, timeout=45
    )
    assert told.returncode == 2, told.stderr[-2000:]
    assert "Traceback" not in told.stderr
    last = told.stderr[told.stderr.rindex("error: ") :]
    assert all(word in last for word in case.words), last


def test_no_input_is_there_twice():
    every = [(case.arguments, case.files, tuple(case.environment.items())) for case in NAMED.values()]
    assert len(every) == len(set(every))
