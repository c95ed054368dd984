"""The documentation's check can fail: it is strict, hides no warning, and sees a page that must fail it first."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
QUIET = {"--quiet", "-q", "--no-strict"}


@pytest.fixture
def commands(monkeypatch, tmp_path) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """What the session `docs` runs, with its options."""
    nox: Any = ModuleType("nox")
    nox.options, nox.Session = SimpleNamespace(), object
    nox.session = lambda function=None, **_: function or (lambda decorated: decorated)
    nox.parametrize = lambda *_, **__: lambda decorated: decorated
    monkeypatch.setitem(sys.modules, "nox", nox)
    monkeypatch.syspath_prepend(str(ROOT))
    spec: Any = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    noxfile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noxfile)
    listed: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    session = SimpleNamespace(
        posargs=[],
        env={},
        install=lambda *_: None,
        create_tmp=lambda: str(tmp_path),
        run=lambda *command, **options: listed.append((command, options)),
    )
    noxfile.docs(session)
    return listed


def test_a_page_that_must_fail_comes_first(commands):
    (broken, expected), (whole, options) = commands
    assert whole[:2] == ("mkdocs", "build")
    assert "--strict" in whole and not QUIET & set(whole)
    assert not options, "success codes would let a failure pass"
    assert broken[: len(whole)] == whole, "what fails there fails here"
    assert expected["success_codes"] == [1]
    assert "strict: true" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the session `docs` runs the same")
def test_a_warning_fails_it(commands):
    command = commands[0][0]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}

    def code(*more: str) -> int:
        return subprocess.run(
            [sys.executable, "-m", *command, *more], env=environment, capture_output=True
        ).returncode

    assert code() == 1
    assert code("--quiet") == 0, "why it is not quiet"
