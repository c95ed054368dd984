"""Every package is complete on its own: metadata, version, licence, changelog, type marker."""

from __future__ import annotations

import ast
import fnmatch
import itertools
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import house, reach, side_by_side
from tools.source_trees import SOURCES, tree_of

ROOT = house.ROOT
PACKAGES = sorted(path for path in (ROOT / "packages").iterdir() if (path / "pyproject.toml").exists())
SOURCE_LINES = 450
FUNCTION_LINES = 60
ARGUMENTS = 10


def source(package: Path) -> Path:
    return package / "src" / package.name.replace("-", "_")


def version(package: Path) -> str:
    return re.search(r'^__version__ = "(.+)"$', (source(package) / "__init__.py").read_text(), re.M).group(1)


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        return [
            path for folder in ("packages", "docs", "tests", "tools") for path in (ROOT / folder).rglob("*.*")
        ]
    return [ROOT / line for line in listed.stdout.splitlines()]


def test_there_are_seven():
    assert len(PACKAGES) == 7


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_package_is_complete(package: Path):
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["name"] == package.name
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert f"## {version(package)}" in (package / "CHANGELOG.md").read_text()
    assert (package / "README.md").read_text().startswith(f"# {package.name}\n")
    assert (source(package) / "py.typed").exists()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_siblings_are_required_by_compatible_range(package: Path):
    for requirement in tomllib.loads((package / "pyproject.toml").read_text())["project"]["dependencies"]:
        if requirement.startswith("cai-"):
            sibling = ROOT / "packages" / re.match(r"[a-z-]+", requirement).group()
            major, minor, _ = map(int, version(sibling).split("."))
            assert requirement.endswith(f">={major}.{minor},<{major}.{minor + 1}"), requirement


def test_source_files_fit_a_reader():
    long = {path: len(path.read_text().splitlines()) for path in ROOT.glob("packages/*/src/**/*.py")}
    assert not {str(path.relative_to(ROOT)): n for path, n in long.items() if n >= SOURCE_LINES}


def test_no_path_of_one_machine_is_written_down():
    private = re.compile(
        "|".join(re.escape(word) for word in ("/" + "root/", "/" + "work/", "/" + "home/", ".." + "/shared"))
    )
    found = []
    for path in tracked_files():
        if path.is_file() and path.suffix in (
            ".py",
            ".md",
            ".toml",
            ".yml",
            ".yaml",
            ".html",
            ".json",
            ".sh",
            "",
        ):
            lines = path.read_text(errors="replace").splitlines()
            found += [
                f"{path.relative_to(ROOT)}:{n}" for n, line in enumerate(lines, 1) if private.search(line)
            ]
    assert not found


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")])


def operators(tree: ast.AST) -> set[str]:
    """Functions with the arguments of an operator's schema, which takes numbers and tensors only: those given to
    `define`, and what they hand all of these to."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "define"]
    given = {getattr(arg, "attr", getattr(arg, "id", "")) for call in calls for arg in call.args}
    bodies = [f for f in functions(tree) if f.name in given]
    called = {
        n.func.id
        for f in bodies
        for n in ast.walk(f)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    return given | called


def test_functions_fit_a_screen():
    long, folders = [], {}
    for path in SOURCES:
        folders.setdefault(path.parent, set()).update(operators(tree_of(path)))
    for path in SOURCES:
        registered = folders[path.parent]
        for function in functions(tree_of(path)):
            lines = function.end_lineno - function.lineno + 1
            marks = map(ast.unparse, function.decorator_list)
            kernel = any("triton.jit" in mark or mark.startswith("operator(") for mark in marks)
            many = arguments(function) > ARGUMENTS and function.name not in registered and not kernel
            if lines > FUNCTION_LINES or many:
                long.append(
                    f"{path.relative_to(ROOT)}: {function.name}: {lines} lines, {arguments(function)} arguments"
                )
    assert not long


def test_nothing_is_left_for_later():
    words = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    sources = {path: path.read_text() for path in ROOT.glob("packages/*/src/**/*.py")}
    assert not [
        str(path.relative_to(ROOT)) for path, text in sources.items() if any(word in text for word in words)
    ]
    assert not [
        str(path) for path in SOURCES if any(isinstance(node, ast.Global) for node in ast.walk(tree_of(path)))
    ]


def collected() -> list[Path]:
    """The files that pytest takes tests from, by the settings it reads."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    files = [path for folder in settings["testpaths"] for path in (ROOT / folder).rglob("*.py")]
    return [path for path in files if any(fnmatch.fnmatch(path.name, p) for p in settings["python_files"])]


def runs(suite: str, path: Path) -> bool:
    """Whether a suite takes tests from a file."""
    words = [house.tests_of(suite)] if suite in house.PACKAGES else house.suite(suite)
    left_out = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    places = [word for word in words if not word.startswith("--")]
    inside = any(path.is_relative_to(ROOT / place) for place in places)
    return inside or not (places or any(path.is_relative_to(ROOT / place) for place in left_out))


def test_every_test_runs_in_one_suite():
    """A new folder is in `rest`, which is told only what to leave out."""
    for path in collected():
        suites = [suite for suite in house.SUITES if runs(suite, path)]
        assert len(suites) == 1, f"{path.relative_to(ROOT)} runs in {suites}"


def test_ci_runs_every_suite():
    """Of a package in `alone`, where it has nothing else, and every file of pairs in `pairs`."""
    sessions = [session for some in house.CI.values() for session in some]
    suites = {f"alone({suite})" if suite in house.PACKAGES else f"rest({suite})" for suite in house.SUITES}
    assert {*sessions} == suites - {"rest(pairs)"} | {"pairs", "lint", "build", "docs"}
    assert set(house.SUITES) == {*house.PACKAGES, *house.FURTHER, "pairs"}


def test_a_block_of_a_readme_runs_with_its_package_or_with_the_rest():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", house.README]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    blocks = {line for line in listed if "test_block_runs" in line}
    (left_out,) = [word for word in house.suite("rest") if word.startswith("--deselect=")]
    apart = {line for line in blocks if line.startswith(left_out.removeprefix("--deselect="))}
    assert apart == {line for line in blocks for name in house.PACKAGES if f"packages/{name}/" in line}
    assert blocks - apart == {line for line in blocks if "[README.md" in line} != set()


def test_the_workflow_has_a_job_for_every_session_of_ci():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (packages,) = re.findall(r"^ +package: \[(.+)\]$", workflow, re.M)
    (others,) = re.findall(r"^ +session: \[(.+)\]$", workflow, re.M)
    assert packages.split(", ") == list(house.PACKAGES)
    assert {"alone", *others.replace(",", "").split()} == {
        *(session.partition("(")[0] for some in house.CI.values() for session in some),
        "compat",
    }
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("nox -s ci")


def test_long_cases_are_tests():
    """A name that is no test any more would leave out nothing."""
    for path, table in tomllib.loads((ROOT / "tests" / "matrix.toml").read_text()).items():
        if "turns" in table:
            assert (ROOT / path).is_dir(), path
            continue
        functions = re.findall(r"^def (test_\w+)\(", (ROOT / path).read_text(), re.M)
        assert {case.partition("[")[0] for case in table["cases"]} <= {*functions}, path


def test_long_cases_are_cases(pytestconfig):
    """A case whose arguments have changed since would leave out nothing."""
    tables = tomllib.loads((ROOT / "tests" / "matrix.toml").read_text())
    named = {
        path: [case for case in table["cases"] if "[" in case]
        for path, table in tables.items()
        if "cases" in table
    }
    files = [path for path, cases in named.items() if cases]
    command = [
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "matrix or not matrix",
        *files,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert run.returncode == 0, run.stdout[-2000:]
    collected: dict[str, list[str]] = {path: [] for path in files}
    for line in run.stdout.splitlines():
        path, _, name = line.partition("::")
        if name:
            collected[path].append(name.rpartition("::")[2])
    house_conftest = next(p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "is_long"))
    stale = [
        f"{path}: {case}"
        for path in files
        for case in named[path]
        if collected[path] and not any(house_conftest.is_long(name, (case,)) for name in collected[path])
    ]
    assert not stale, "\n".join(stale)


@pytest.mark.parametrize(
    ("case", "matches"),
    [
        ("test_a", True),
        ("test_a[one-2]", True),
        ("test_a[one-*", True),
        ("test_a[one]", False),
        ("test_b*", False),
    ],
)
def test_long_cases_are_told_by_name(case, matches, pytestconfig):
    house_conftest = next(p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "is_long"))
    assert house_conftest.is_long("test_a[one-2]", (case,)) == matches


@pytest.mark.parametrize(
    ("indices", "waits"),
    [
        ([{"a": 0}, {"a": 1}], [False, False]),
        ([{"a": i, "b": j} for i in range(2) for j in range(3)], [False, True, False, True, False, True]),
        ([{"a": i, "with a": i, "b": j} for i in range(2) for j in range(2)], [False, True, True, False]),
        (
            [{"a": i // 2, "of a": i, "b": j} for i in range(3) for j in range(2)],
            [False, True, True, False, False, True],
        ),
        ([{"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 2}], [False, False, False]),
    ],
)
def test_cases_take_turns(indices, waits, pytestconfig):
    house_conftest = next(p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "out_of_turn"))
    assert house_conftest.out_of_turn(indices) == waits


@pytest.mark.parametrize(
    "lengths", [(2, 2), (2, 9), (3, 4), (8, 8), (2, 2, 2), (2, 3, 5), (4, 1, 6), (2, 2, 2, 3)]
)
def test_every_option_keeps_a_turn(lengths, pytestconfig):
    house_conftest = next(p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "out_of_turn"))
    cases = [dict(enumerate(places)) for places in itertools.product(*map(range, lengths))]
    stay = [case for case, waits in zip(cases, house_conftest.out_of_turn(cases), strict=True) if not waits]
    assert all({case[axis] for case in stay} == {*range(length)} for axis, length in enumerate(lengths))
    assert len(stay) <= math.ceil(len(cases) / 2)


def test_every_suite_has_a_budget():
    budgets = tomllib.loads((ROOT / "tests" / "budgets.toml").read_text())
    assert set(budgets) == {*house.SUITES, *house.PAIRS}


def test_a_suite_over_its_budget_fails(pytestconfig):
    (shared,) = [
        plugin for plugin in pytestconfig.pluginmanager.get_plugins() if hasattr(plugin, "over_budget")
    ]
    counts = {"processes": 3, "groups": 5}
    assert not shared.over_budget("a", counts, {"a": {"processes": 3, "groups": 5}})
    (line,) = shared.over_budget("a", counts, {"a": {"processes": 3, "groups": 4}})
    assert "a started 5 groups, its budget is 4" in line
    assert len(shared.over_budget("unknown", counts, {})) == 2


def test_one_job_that_fails_stops_no_other():
    shown: list[str] = []
    python = [sys.executable, "-c"]
    jobs = [
        side_by_side.Job("bad", [*python, "print('out of bad'); raise SystemExit(3)"]),
        side_by_side.Job("good", [*python, "import os; print(os.environ['WORD'])"], {"WORD": "out of good"}),
    ]
    assert not side_by_side.run(jobs, shown.append)
    text = "\n".join(shown)
    assert "out of bad" in text and "out of good" in text and "FAILED with 3" in text
    assert side_by_side.run(jobs[1:], shown.append)


def test_a_change_reaches_tests_through_the_face_of_a_package():
    """The nearest first, and not every test of the package."""
    source = ROOT / "packages/cai-mesh/src/cai_mesh/sizes.py"
    tests = [str(path.relative_to(ROOT)) for path in reach.reached([source])]
    assert tests[:3] == list(reach.ALWAYS)
    assert "packages/cai-gemini/tests/test_offload.py" in tests
    assert "packages/cai-mesh/tests/test_layout.py" not in tests
