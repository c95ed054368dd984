"""Run the tests that a change reaches by imports, nearest first, until a time limit.

`python tools/reach.py [--base REV] [--minutes N] [--list]`. A test file is reached by a changed file that it is, that
it imports, or that one of those imports. A name that a package's `__init__` passes on leads to the file that defines
it, so the whole package is not reached through its face. What the limit left out is listed at the end.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINUTES = 6.0
"""What `nox -s quick` has for tests, of its eight minutes."""
ALWAYS = ("tests/test_import_rules.py", "tests/test_house.py", "tests/test_promises.py")
"""Rules that read every source file."""


def changed(base: str | None) -> list[Path]:
    """Files that differ from `base`; by default from HEAD, or in a clean tree those of the last commit."""

    def names(*words: str) -> list[str]:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return run.stdout.splitlines()

    untracked = names("ls-files", "--others", "--exclude-standard")
    files = [*names("diff", "--name-only", base or "HEAD"), *untracked]
    return [ROOT / name for name in files or names("diff", "--name-only", "HEAD~1")]


def is_test(path: Path) -> bool:
    """Whether pytest takes tests from a file."""
    return path.name.startswith("test_") or "_x_" in path.name


def python_files() -> dict[str, Path]:
    """Module name to file: sources by their dotted names, what tests share by its last name, tests by their path."""
    modules = {}
    for source in ROOT.glob("packages/*/src"):
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for path in [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        modules[str(path.relative_to(ROOT)) if is_test(path) else path.stem] = path
    return modules


def names_imported(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name) of each import of a file; the name is None where the module itself is imported."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def lazy_names(path: Path) -> dict[str, str]:
    """Name to the file beside it, of an `__init__` that gives a dict of these to `lazy`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Dict) and all(
            isinstance(value, ast.List | ast.Tuple) for value in node.values
        ):
            try:
                table = ast.literal_eval(node)
            except ValueError:
                continue
            return {name: file for file, names in table.items() for name in names}
    return {}


class Graph:
    """Which files of the house a file imports."""

    def __init__(self) -> None:
        self.modules = python_files()
        self._edges: dict[Path, set[Path]] = {}

    def _home(self, module: str, name: str | None) -> Iterator[Path]:
        if name and f"{module}.{name}" in self.modules:
            yield self.modules[f"{module}.{name}"]
            return
        path = self.modules.get(module) or self.modules.get(module.rpartition(".")[2])
        if path is None:
            return
        if name and path.stem == "__init__":
            lazily = lazy_names(path)
            if name in lazily:
                yield from self._home(f"{module}.{lazily[name]}", name)
                return
            for inner, inner_name in names_imported(path):
                if inner_name == name and inner != module:
                    yield from self._home(inner, name)
                    return
        yield path

    def imports(self, path: Path) -> set[Path]:
        """The files that a file imports, wherever the import stands."""
        if path not in self._edges:
            pairs = names_imported(path)
            self._edges[path] = {home for module, name in pairs for home in self._home(module, name)}
        return self._edges[path]

    def distances(self, sources: Iterable[Path]) -> dict[Path, int]:
        """How many imports away from `sources` each file is that reaches them."""
        importers: dict[Path, set[Path]] = {}
        for path in self.modules.values():
            for target in self.imports(path):
                importers.setdefault(target, set()).add(path)
        distance = {path: 0 for path in sources if path.exists()}
        front = list(distance)
        while front:
            nearer = front.pop(0)
            for path in importers.get(nearer, ()):
                if path not in distance:
                    distance[path] = distance[nearer] + 1
                    front.append(path)
        return distance


def reached(sources: Iterable[Path]) -> list[Path]:
    """Test files that `sources` reach, nearest first, behind the rules that read everything."""
    distance = Graph().distances(sources)
    tests = [path for path in distance if is_test(path)]
    tests.sort(key=lambda path: (distance[path], path))
    always = [ROOT / name for name in ALWAYS]
    return [*always, *(path for path in tests if path not in always)]


def main() -> int:
    """Run them; returns pytest's exit code, or 0 where the limit ended it without a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="a revision; what differs from it is the change")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit on the tests")
    parser.add_argument("--list", action="store_true", help="print the files and run nothing")
    options = parser.parse_args()
    tests = reached(changed(options.base))
    if options.list:
        print(*(path.relative_to(ROOT) for path in tests), sep="\n")
        return 0
    deadline, code = time.monotonic() + 60 * options.minutes, 0
    while tests and time.monotonic() < deadline and not code:
        few, tests = tests[:8], tests[8:]
        left = max(1.0, deadline - time.monotonic())
        command = [sys.executable, "-m", "pytest", "-q", *map(str, few)]
        try:
            ended = subprocess.run(command, cwd=ROOT, timeout=left, check=False).returncode
            code = 0 if ended == 5 else ended  # 5: every test of these files is a GPU's or the matrix's
        except subprocess.TimeoutExpired:
            tests = [*few, *tests]
            break
    names = [str(path.relative_to(ROOT)) for path in tests]
    if names:
        print(f"not run, for the limit of {options.minutes:g} minutes or a failure:", *names, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main())
