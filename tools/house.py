"""What the nox sessions share: who runs which test, one torch for all, wheels built once, checks recorded by content.

One torch. `pip install torch==2.13.0` runs once, first and on its own, into `.nox/torch-python*`, which holds
torch and torch's own dependencies and nothing else. Every other environment is an ordinary clean virtualenv
with one extra file, `shared.pth`, that appends that site-packages directory to its `sys.path`; pip finds
torch installed there and a constraints file forbids it any other. Where the interpreter that runs nox already
has a GPU build of torch, that one is used in the same way and nothing is installed.

One set of third-party packages. `.nox/third-python*` holds all that any package, extra, test or example declares, and
is appended in the same way. `alone` of every package but cai-apps does without it: its clean environment shows that
nothing undeclared is needed.

Sessions may run side by side: what they share is made and written under a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import runpy
import shlex
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import Version

if TYPE_CHECKING:
    import nox

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".nox"
RECORDS = CACHE / "records.json"
PACKAGES = (
    "cai-mesh",
    "cai-tensor-parallel",
    "cai-pipeline",
    "cai-zero",
    "cai-gemini",
    "cai-kernels",
    "cai-apps",
)
EXAMPLES = ("transformers>=5", "accelerate", "peft", "lightning-fabric")
"""What the scripts of examples/, and so their tests, need beside the packages."""

ON_GPUS = ("cudnn",)
"""Extras of packages that are of use on GPUs alone."""

TESTED_TORCH = "2.13.0"


def module(package: str) -> str:
    """The import name of a package."""
    return package.replace("-", "_")


def project(package: str, root: Path = ROOT) -> dict:
    """The parsed pyproject.toml of a package."""
    return tomllib.loads((root / "packages" / package / "pyproject.toml").read_text())


def siblings(package: str) -> list[Requirement]:
    """The requirements of a package on other packages of this repository."""
    requirements = map(Requirement, project(package)["project"]["dependencies"])
    return [requirement for requirement in requirements if requirement.name in PACKAGES]


def test_requirements(*packages: str) -> list[str]:
    """What the tests of these packages need beyond the packages' own dependencies."""
    return sorted({line for package in packages for line in project(package)["dependency-groups"]["test"]})


def version(package: str) -> Version:
    """The version of a package in the working tree."""
    source = ROOT / "packages" / package / "src" / module(package) / "__init__.py"
    line = next(line for line in source.read_text().splitlines() if line.startswith("__version__"))
    return Version(line.split('"')[1])


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold what `name` stands for, against other sessions that run at the same time."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- who runs which test -------------------------------------------------------------

PAIRS = sorted(path.stem for path in (ROOT / "tests" / "pairs").glob("*_x_*.py"))
README = "tests/test_readme.py"
"""Runs the blocks of every README: those of a package with the package, the others with the rest."""


def tests_of(package: str) -> str:
    """The folder whose tests `alone` runs for a package."""
    return f"packages/{package}/tests"


def tests_of_pair(pair: str) -> str:
    """The file that `pairs` runs."""
    return f"tests/pairs/{pair}.py"


FAULTS = ("tests/faults",)
"""Runs as processes, some of which wait for a clock."""
LOOPS = ("tests/loops", "tests/layers", "tests/examples")
"""Other people's loops and layers, on ranks."""
FURTHER = ("rest", "loops", "faults")
"""What neither `alone` nor `pairs` runs."""
SUITES = ("cai-apps", "cai-kernels", "rest", "cai-gemini", "pairs", "cai-zero", "faults", "loops", "cai-pipeline",
          "cai-tensor-parallel", "cai-mesh")  # fmt: skip
"""Every test once, the longest first, so that the last ones to run are short."""


def suite(name: str) -> list[str]:
    """What to tell pytest so that it runs a suite. `rest` is told only what to leave out: a new folder is in it."""
    if name in ("faults", "loops"):
        return list(FAULTS if name == "faults" else LOOPS)
    if name == "pairs":
        return [*map(tests_of_pair, PAIRS)]
    apart = [*map(tests_of, PACKAGES), *map(tests_of_pair, PAIRS), *FAULTS, *LOOPS]
    return [*(f"--ignore={path}" for path in apart), f"--deselect={README}::test_block_runs[packages/"]


CI = {
    "alone(cai-apps)": ["alone(cai-apps)"],
    "alone(cai-kernels)": ["alone(cai-kernels)"],
    "rest": ["rest(rest)"],
    "alone(cai-gemini)": ["alone(cai-gemini)"],
    "pairs": ["pairs"],
    "alone(cai-zero)": ["alone(cai-zero)"],
    "faults": ["rest(faults)"],
    "loops": ["rest(loops)"],
    "alone(cai-pipeline)": ["alone(cai-pipeline)"],
    "alone(cai-tensor-parallel)": ["alone(cai-tensor-parallel)"],
    "alone(cai-mesh)": ["alone(cai-mesh)"],
    "lint build docs": ["lint", "build", "docs"],
}
"""The sessions of `nox -s ci`, the longest first."""


# --- one torch -----------------------------------------------------------------------


def _existing_gpu_torch() -> list[Path]:
    """The directories behind a GPU build of torch in the interpreter that runs nox, or none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    build = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    if not (build.get("cuda") or build.get("hip")):
        return []
    return [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]


def _installed_torch(session: nox.Session) -> list[Path]:
    """`.nox/torch-python*`, installed on first use and again when `CAI_TORCH` asks for another one."""
    wanted = os.environ.get("CAI_TORCH") or TESTED_TORCH
    requirement = shlex.split(wanted if not wanted[0].isdigit() else f"torch=={wanted}")
    home = CACHE / f"torch-python{sys.version_info.major}.{sys.version_info.minor}"
    marker = home / "requirement"
    if not marker.exists() or marker.read_text() != wanted:
        session.run_install(sys.executable, "-m", "virtualenv", "--clear", "-q", str(home), external=True)
        session.run_install(str(home / "bin" / "python"), "-m", "pip", "install", *requirement, external=True)
        marker.write_text(wanted)
    return sorted(home.glob("lib/python*/site-packages"))


def _append(environment: Path, directories: Iterable[Path]) -> None:
    """Let an environment see what is installed in these directories, behind its own packages."""
    for site in environment.glob("lib/python*/site-packages"):
        (site / "shared.pth").write_text("".join(f"{directory}\n" for directory in directories))


def link_torch(session: nox.Session, *, third_party: bool = False) -> Path:
    """Let this session's environment see the one torch; returns constraints that keep it the only one.

    Args:
        third_party: whether it sees the shared third-party packages, too.
    """
    existing = [] if os.environ.get("CAI_TORCH") else _existing_gpu_torch()
    with locked("torch"):
        directories = existing or _installed_torch(session)
    release = next(iter(distributions(name="torch", path=[str(path) for path in directories]))).version
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text(f"torch=={release}\n")
    if third_party:
        with locked("third-party"):
            directories = [*_installed_third_party(session, directories, constraints), *directories]
    _append(Path(session.virtualenv.location), directories)
    return constraints


def _extras(parsed: dict) -> dict[str, list[str]]:
    return parsed["project"].get("optional-dependencies", {})


def third_party_requirements() -> list[str]:
    """All that packages, their extras and their tests, and the examples declare, but for torch and each other.

    Extras of `ON_GPUS` are left out: they bring libraries that no CPU can use.
    """
    declared = [*EXAMPLES, "hatchling", "editables"]
    for package in PACKAGES:
        parsed = project(package)
        lists = [
            parsed["project"]["dependencies"],
            *(lines for name, lines in _extras(parsed).items() if name not in ON_GPUS),
        ]
        declared += [line for lines in [*lists, parsed["dependency-groups"]["test"]] for line in lines]
    return sorted({line for line in declared if Requirement(line).name not in {*PACKAGES, "torch"}})


def _installed_third_party(session: nox.Session, torch: list[Path], constraints: Path) -> list[Path]:
    """`.nox/third-python*`, made anew when another package is declared or torch is another."""
    home = CACHE / f"third-python{sys.version_info.major}.{sys.version_info.minor}"
    marker, content = (
        home / "requirements",
        [*third_party_requirements(), constraints.read_text(), *map(str, torch)],
    )
    if not marker.exists() or marker.read_text() != "\n".join(content):
        session.run_install(sys.executable, "-m", "virtualenv", "--clear", "-q", str(home), external=True)
        _append(home, torch)
        install = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(constraints)]
        session.run_install(*install, *third_party_requirements(), external=True)
        marker.write_text("\n".join(content))
    return sorted(home.glob("lib/python*/site-packages"))


def share(session: nox.Session) -> None:
    """Make what all sessions share, once and before any of them."""
    link_torch(session, third_party=True)


def install_everything(session: nox.Session, *requirements: str, third_party: bool = True) -> None:
    """Install all seven packages, editable, over the one torch and, unless told otherwise, the shared packages."""
    constraints = link_torch(session, third_party=third_party)
    if not third_party:  # among the shared packages is the backend that builds ours
        session.install("hatchling", "editables")
    editable = [word for package in PACKAGES for word in ("-e", str(ROOT / "packages" / package))]
    session.install("--no-build-isolation", "-c", str(constraints), *editable, *requirements)


# --- wheels --------------------------------------------------------------------------


def digest(paths: Iterable[Path]) -> str:
    """One hash over files and directories, by relative name and content; caches and bytecode do not count."""
    total = hashlib.sha256()
    for path in sorted(paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith("."):
                total.update(
                    f"{file.relative_to(ROOT)}\0".encode() + hashlib.sha256(file.read_bytes()).digest()
                )
    return total.hexdigest()[:16]


def _builder(session: nox.Session) -> str:
    """A Python with hatchling, the backend that `hatch build` calls, in an environment of its own."""
    home = CACHE / "builder"
    python = str(home / "bin" / "python")
    with locked("builder"):
        if not (home / "ready").exists():
            session.run_install(sys.executable, "-m", "virtualenv", "--clear", "-q", str(home), external=True)
            session.run_install(python, "-m", "pip", "install", "-q", "hatchling", external=True)
            (home / "ready").touch()
    return python


def build(
    session: nox.Session, package: str, target: Path, *, source: Path = ROOT, kinds: tuple[str, ...]
) -> None:
    """Build the `sdist` and/or `wheel` of a package into `target`."""
    python = _builder(session)
    with session.chdir(source / "packages" / package):
        for kind in kinds:
            session.run(
                python, "-m", "hatchling", "build", "-t", kind, "-d", str(target), external=True, silent=True
            )


def wheel(session: nox.Session, package: str, tag: str | None = None) -> Path:
    """The wheel of a package at HEAD, or at a git tag; built once per content."""
    with locked("wheels"):
        return _wheel(session, package, tag)


def _wheel(session: nox.Session, package: str, tag: str | None) -> Path:
    source = ROOT
    if tag is None:
        inputs = ("src", "pyproject.toml", "README.md", "LICENSE")
        target = CACHE / "wheels" / digest(ROOT / "packages" / package / name for name in inputs)
    else:
        target, source = CACHE / "wheels" / tag, CACHE / "tags" / tag
        if not source.exists():
            archive = subprocess.check_output(["git", "archive", tag, f"packages/{package}"], cwd=ROOT)
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(source, filter="data")
    pattern = f"{module(package)}-*.whl"
    if not list(target.glob(pattern)):
        build(session, package, target, source=source, kinds=("wheel",))
    return next(target.glob(pattern))


def oldest(requirement: Requirement) -> str | None:
    """The tag of the oldest released version a requirement admits; None: that is the working tree's."""
    name = requirement.name
    tags = subprocess.run(
        ["git", "tag", "--list", f"{name}-v*"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    released = {Version(tag.removeprefix(f"{name}-v")): tag for tag in tags.split()}
    admitted = sorted(version for version in released if version in requirement.specifier)
    return released[admitted[0]] if admitted and admitted[0] < version(name) else None


def install_wheels(
    session: nox.Session, packages: Iterable[str], wheels: dict[str, Path], *extra: str, clean: bool = True
) -> Path:
    """Install packages from these wheels, with what they declare and nothing else of the house.

    The wheels go in as constraints: a sibling is installed only when something declares it, and never from
    an index. A clean environment has no third-party package that was not declared, either.
    """
    constraints = link_torch(session, third_party=not clean)
    pins = "".join(f"{name} @ {path.as_uri()}\n" for name, path in wheels.items())
    constraints.write_text(constraints.read_text() + pins)
    session.install("-c", str(constraints), *packages, *extra)
    return constraints


# --- what was already shown ----------------------------------------------------------


def shown(check: str, key: str) -> bool:
    """Whether this check passed before on exactly this content."""
    return RECORDS.exists() and json.loads(RECORDS.read_text()).get(check) == key


def record(check: str, key: str) -> None:
    """Remember that a check passed on this content."""
    with locked("records"):
        records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
        written = RECORDS.with_suffix(".new")
        written.write_text(json.dumps(records | {check: key}, indent=1, sort_keys=True))
        written.replace(RECORDS)
