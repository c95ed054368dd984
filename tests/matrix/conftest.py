"""Results of the matrix: written case by case to docs/proof/matrix.json, and not repeated on the same sources."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "proof" / "matrix.json"


def sources(config: pytest.Config) -> str | None:
    """The git tree of packages/, or None while it holds changes that are not committed."""
    if config.getoption("sources", default=None):
        return config.getoption("sources")

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    return None if git("status", "--porcelain", "packages") else git("rev-parse", "HEAD:packages")


def results() -> dict[str, dict]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--force", action="store_true", help="run cases that passed on these sources before, too"
    )
    parser.addoption(
        "--sources", help="git tree of packages/, where this copy of the repository has no history"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("markexpr") != "matrix" or config.getoption("force", default=False):
        return
    tree, recorded = sources(config), results()
    done = [
        item
        for item in items
        if item.name in recorded and recorded[item.name]["sources"] == tree and recorded[item.name]["passed"]
    ]
    config.hook.pytest_deselected(items=done)
    items[:] = [item for item in items if item not in done]


class Recorder:
    """Writes one entry a case, in the process that collects reports (with pytest-xdist, not in its workers)."""

    def __init__(self, config: pytest.Config):
        self._tree = sources(config)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            entry = {"sources": self._tree, "torch": torch.__version__, "passed": report.passed}
            entry |= {"seconds": round(report.duration, 1)} | dict(report.user_properties)
            name = report.nodeid.split("::")[-1]
            RESULTS.write_text(json.dumps(results() | {name: entry}, indent=1, sort_keys=True) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") == "matrix" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config))
