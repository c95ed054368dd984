"""Results of the matrix: written case by case to docs/proof/matrix.json, and not repeated on the same sources."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "proof" / "matrix.json"


def sources() -> str | None:
    """The git tree of packages/, or None while it holds changes that are not committed."""

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("markexpr") != "matrix" or config.getoption("force", default=False):
        return
    tree, recorded = sources(), results()
    done = [
        item
        for item in items
        if item.name in recorded and recorded[item.name]["sources"] == tree and recorded[item.name]["passed"]
    ]
    config.hook.pytest_deselected(items=done)
    items[:] = [item for item in items if item not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if call.when == "call":
        entry = {"sources": sources(), "passed": report.passed, "seconds": round(report.duration, 1)}
        entries = results() | {item.name: entry | dict(report.user_properties)}
        RESULTS.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    return report
