"""What all suites share: cases that are the matrix's, a lock around tests that fill the machine, and budgets.

`CAI_TESTS_LOCK` names a file. Suites that run side by side hold it while they run four ranks or more, or a launcher.
`CAI_TESTS_BUDGET` names a suite: at its end, what it started is held against its row of `tests/budgets.toml`. Counts of
processes and of groups of ranks tell that a suite has become slower where a clock, on a shared machine, cannot.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
MANY = 4
"""Ranks that fill two cores."""
MOST = 4
"""The most cases of a product of which one stays in the suite."""
LAUNCHERS = ("tests/faults", "tests/examples", "packages/cai-apps/tests/run")
"""Folders whose tests start programs that start ranks."""

started: Counter[str] = Counter()
"""`processes` and `groups` (of ranks) that this process has started."""


def _count_commands(event: str, arguments: tuple) -> None:
    """Count commands that are Python; a compiler runs where its cache is empty, which is no fault of a suite."""
    if event == "subprocess.Popen":
        program = str(arguments[0] or arguments[1])
        started["processes"] += Path(program).name.startswith(("python", "cai"))


def _count_processes() -> None:
    start = BaseProcess.start

    @functools.wraps(start)
    def counted(self: BaseProcess) -> None:
        started["processes"] += 1
        start(self)

    BaseProcess.start = counted  # type: ignore[method-assign]


sys.addaudithook(_count_commands)
_count_processes()


@contextlib.contextmanager
def machine() -> Iterator[None]:
    """Hold the machine against the tests of other sessions that fill it, where `CAI_TESTS_LOCK` is set."""
    path = os.environ.get("CAI_TESTS_LOCK")
    if not path:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _watch_ranks() -> None:
    """Count groups of ranks, and hold the machine while there are many ranks."""
    pool = getattr(sys.modules.get("cai_mesh.testing"), "RankPool", None)
    if pool is None or hasattr(pool.run, "__wrapped__"):
        return
    run = pool.run

    @functools.wraps(run)
    def watched(self, n: int, *arguments, **keywords):
        before = self.groups
        try:
            with machine() if n >= MANY and not _holds else contextlib.nullcontext():
                return run(self, n, *arguments, **keywords)
        finally:
            started["groups"] += self.groups - before

    pool.run = watched


_holds: list[str] = []
"""The test that holds the machine as a whole."""


@functools.cache
def matrix_tables() -> tuple[dict[Path, tuple[str, ...]], dict[Path, int]]:
    """Of `tests/matrix.toml` the cases by file, and by folder how large a product is whose cases take turns."""
    tables = tomllib.loads((ROOT / "tests" / "matrix.toml").read_text())
    cases = {ROOT / path: tuple(table["cases"]) for path, table in tables.items() if "cases" in table}
    return cases, {ROOT / path: table["turns"] for path, table in tables.items() if "turns" in table}


def is_long(name: str, cases: tuple[str, ...]) -> bool:
    """Whether a test of that name, with its case in brackets, is among cases."""
    function = name.partition("[")[0]
    return any(name.startswith(case[:-1]) if case[-1] == "*" else case in (name, function) for case in cases)


def out_of_turn(cases: list[dict[str, object]]) -> list[bool]:
    """Which cases of a product of options wait for the matrix: all but one in `MOST`, or in two, as on a board.

    A case stays where the places of its options add up to a multiple. Each option then meets some of those of the other
    axes, and every option is in a case that stays. Cases of one axis have no turns, and what is listed and not
    multiplied out has none.

    Args:
        cases: of each case the options by argument; one option is one object in all cases that have it.
    """
    columns = {_places([case[name] for case in cases]) for name in cases[0]}
    axes = [
        axis for axis in columns if max(axis) and not any(_says(other, axis) for other in columns - {axis})
    ]
    if len(axes) < 2 or math.prod(max(axis) + 1 for axis in axes) != len(cases):
        return [False] * len(cases)
    steps = [max(axis) for axis in axes]
    turns = min(MOST, sum(steps) - max(steps) + 1)  # no more than sums of places there are beside any option
    return [sum(places) % turns > 0 for places in zip(*axes, strict=True)]


def _says(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether an argument's option says another's, as where both are of one list."""
    return len({*zip(one, other, strict=True)}) == len({*one})


def _places(options: list[object]) -> tuple[int, ...]:
    """The number of each option among those that differ, in the order of their first appearance."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(id(option), len(numbers)) for option in options)


def _take_turns(items: list[pytest.Item]) -> None:
    products: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            products.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for (path, _), cases in products.items():
        least = next((least for folder, least in matrix_tables()[1].items() if folder in path.parents), None)
        if least is None or len(cases) < least or any(case.get_closest_marker("matrix") for case in cases):
            continue  # small, or chosen in place
        options = [case.callspec.params for case in cases]  # type: ignore[attr-defined]
        for case, waits in zip(cases, out_of_turn(options), strict=True):
            if waits:
                case.add_marker(pytest.mark.matrix)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of `tests/matrix.toml`, before pytest leaves out what is marked so."""
    _take_turns(items)
    for item in items:
        if is_long(item.name, matrix_tables()[0].get(item.path, ())):
            item.add_marker(pytest.mark.matrix)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _watch_ranks()
    if not item.path.is_relative_to(ROOT) or not str(item.path.relative_to(ROOT)).startswith(LAUNCHERS):
        return (yield)
    with machine():
        _holds.append(item.nodeid)
        try:
            return (yield)
        finally:
            _holds.clear()


def over_budget(suite: str, counts: Counter[str], budgets: dict[str, dict[str, int]]) -> list[str]:
    """What a suite started more of than its row allows, a line each."""
    allowed = budgets.get(suite, {"processes": 0, "groups": 0})
    return [
        f"{suite} started {counts[kind]} {kind}, its budget is {limit}: tests/budgets.toml"
        for kind, limit in allowed.items()
        if counts[kind] > limit
    ]


def pytest_sessionfinish(session: pytest.Session) -> None:
    suite = os.environ.get("CAI_TESTS_BUDGET")
    if not suite or session.config.option.collectonly:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reporter.write_line(
        f"{suite}: started {started['processes']} processes, {started['groups']} groups of ranks"
    )
    budgets = tomllib.loads((ROOT / "tests" / "budgets.toml").read_text())
    wrong = over_budget(suite, started, budgets)
    for line in wrong:
        reporter.write_line(line, red=True)
    if wrong:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
