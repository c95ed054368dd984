"""The commands of the house: `nox -s train`, `nox -s tests`, and the checks behind them (`nox -l`).

How one torch serves every environment is told in tools/house.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))
from tools import house

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "no"
nox.options.sessions = ["tests", "lint"]

ABSENT = """
import sys, importlib.util
found = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
sys.exit(f"not declared, yet importable: {found}" if found else 0)
"""
PAIRS = {
    "tp": "cai-tensor-parallel",
    "pp": "cai-pipeline",
    "zero": "cai-zero",
    "gemini": "cai-gemini",
    "kernels": "cai-kernels",
}
TEST_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
FAULTS = "tests/faults"
"""Runs as processes, some of which wait for a clock: one at a time."""
# As many tests at once as there are cores. Kernels in an interpreter are one thread each, and no test waits for ranks;
# an application's tests wait for files, processes and compilers. Files stay together, as they share runs and ranks.
SPREAD = {"cai-kernels": ("-n", "auto"), "cai-apps": ("-n", "auto", "--dist", "loadfile")}


@nox.session(reuse_venv=True)
def train(session: nox.Session) -> None:
    """Train the small LLaMA on real text; `-- RECIPE --section.key value` trains something else."""
    house.install_everything(session)
    session.run("cai", "train", *(session.posargs or ["llama-tiny"]))


def _install_for_tests(session: nox.Session) -> None:
    house.install_everything(session, *house.test_requirements(*house.PACKAGES), *house.EXAMPLES)


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """The whole suite in one environment; arguments go to pytest."""
    _install_for_tests(session)
    if session.posargs:
        session.run("pytest", *session.posargs, env=TEST_ENVIRONMENT)
        return
    apart = {house.tests_of(package): options for package, options in SPREAD.items()}
    session.run("pytest", *(f"--ignore={path}" for path in apart), env=TEST_ENVIRONMENT)
    for path, options in apart.items():
        session.run("pytest", path, *options, env=TEST_ENVIRONMENT)


@nox.session(reuse_venv=True)
def rest(session: nox.Session) -> None:
    """The tests that neither `alone` nor `pairs` runs: the house's rules, the examples, the README at the root."""
    _install_for_tests(session)
    spread = ("-n", "auto", "--dist", "loadfile")
    session.run("pytest", *house.the_rest(), f"--ignore={FAULTS}", *spread, env=TEST_ENVIRONMENT)
    session.run("pytest", FAULTS, env=TEST_ENVIRONMENT)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """ruff's rules and format, and pyright over the sources."""
    constraints = house.link_torch(session)
    tools = ("ruff", "pyright[nodejs]", "nox", "numpy", "pytest")
    session.install("-c", str(constraints), *tools, *house.EXAMPLES)  # typed against what is integrated
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("pyright", "--pythonpath", str(Path(session.bin) / "python"))


def _prove(
    session: nox.Session,
    check: str,
    packages: list[str],
    wheels: dict[str, Path],
    tests: str,
    *tools: str,
) -> None:
    """Install `packages` alone with test `tools`, see that no other sibling came along, and run `tests`."""
    path = house.ROOT / tests
    content = [
        *wheels.values(),
        path if path.is_dir() else path.parent,
        house.ROOT / "pyproject.toml",
        house.ROOT / house.README,
    ]
    content += [house.ROOT / "packages" / package / "README.md" for package in packages]
    key = house.digest(content)
    if house.shown(check, key) and "--force" not in session.posargs:
        session.skip(f"{check} passed before on this content; -- --force runs it again")
    house.install_wheels(session, packages, wheels, *house.test_requirements(*packages), *tools)
    declared = {
        *packages,
        *(requirement.name for package in packages for requirement in house.siblings(package)),
    }
    absent = [house.module(name) for name in house.PACKAGES if name not in declared]
    session.run("python", "-c", ABSENT, *absent)
    environment = TEST_ENVIRONMENT | {"PYTHONPATH": ""}
    options = SPREAD.get(packages[0], ()) if len(packages) == 1 else ()
    session.run("pytest", tests, *options, env=environment)
    if len(packages) == 1:
        session.run("pytest", house.README, "-k", f"packages/{packages[0]}/", env=environment)
    house.record(check, key)


@nox.session
@nox.parametrize("package", house.PACKAGES, ids=house.PACKAGES)
def alone(session: nox.Session, package: str) -> None:
    """A built wheel, in a clean environment with only what it declares, runs its own tests and README."""
    needed = {package, *(requirement.name for requirement in house.siblings(package))}
    wheels = {name: house.wheel(session, name) for name in sorted(needed)}
    _prove(session, f"alone({package})", [package], wheels, house.tests_of(package))


@nox.session
@nox.parametrize("pair", house.PAIRS, ids=house.PAIRS)
def pairs(session: nox.Session, pair: str) -> None:
    """Two packages, or three, and cai-mesh, and nothing else of ours, in a foreign loop."""
    packages = [PAIRS[word] for word in pair.split("_x_")]
    wheels = {name: house.wheel(session, name) for name in ["cai-mesh", *packages]}
    _prove(session, f"pairs({pair})", packages, wheels, house.tests_of_pair(pair), "transformers>=5")


WITH_SIBLINGS = [package for package in house.PACKAGES if house.siblings(package)]


@nox.session
@nox.parametrize("package", WITH_SIBLINGS, ids=WITH_SIBLINGS)
def compat(session: nox.Session, package: str) -> None:
    """A package as it stands against the oldest released siblings its requirements admit."""
    wheels = {package: house.wheel(session, package)}
    wheels |= {
        need.name: house.wheel(session, need.name, house.oldest(need)) for need in house.siblings(package)
    }
    _prove(session, f"compat({package})", [package], wheels, house.tests_of(package))


OLDEST_TRITON = "triton==3.6.*"  # as cai-kernels[triton] admits


@nox.session(reuse_venv=True)
def oldest(session: nox.Session) -> None:
    """Kernels compile for a Hopper GPU with the oldest Triton, too."""
    house.install_everything(session, *house.test_requirements("cai-kernels"))
    session.install(OLDEST_TRITON)
    session.run(
        "pytest",
        f"{house.tests_of('cai-kernels')}/test_hopper.py",
        "-m",
        "matrix or not matrix",
        env=TEST_ENVIRONMENT,
    )


OLDEST_TORCH = "torch==2.11.*"  # as every package admits


@nox.session(reuse_venv=True)
def oldest_torch(session: nox.Session) -> None:
    """Ranks start, stop, fail and go on with the oldest torch, too."""
    house.install_everything(session, *house.test_requirements(*house.PACKAGES))
    session.install(OLDEST_TORCH)
    session.run(
        "pytest", "packages/cai-apps/tests/run", "tests/faults", *session.posargs, env=TEST_ENVIRONMENT
    )


@nox.session(reuse_venv=True)
def matrix(session: nox.Session) -> None:
    """Whole products of options; resumable, results in docs/proof/matrix.json; `-- --force` repeats."""
    house.install_everything(session, *house.test_requirements(*house.PACKAGES))
    # pytest ends with 5 when every case is recorded already.
    session.run(
        "pytest",
        "tests/matrix",
        "tests/faults",
        "tests/pairs",
        "packages/cai-zero/tests",
        "packages/cai-apps/tests",
        "packages/cai-kernels/tests/test_hopper.py",
        "-m",
        "matrix and not gpu",
        *session.posargs,
        env=TEST_ENVIRONMENT,
        success_codes=[0, 5],
    )


@nox.session(reuse_venv=True)
def sweep(session: nox.Session) -> None:
    """Every causal LM of transformers against a plain loop; resumable, results in docs/proof/sweep.json."""
    house.install_everything(session, *house.test_requirements(*house.PACKAGES))
    session.run("python", "tests/sweep/table.py", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The tests that need a GPU, in the environment nox finds itself in."""
    sources = os.pathsep.join(str(house.ROOT / "packages" / name / "src") for name in house.PACKAGES)
    path = os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH"))))
    session.run(sys.executable, "-m", "pytest", "-m", "gpu", *session.posargs, env={"PYTHONPATH": path})


@nox.session
def build(session: nox.Session) -> None:
    """Fill dist/ with every wheel and sdist, then install from it by name in a clean environment."""
    dist = house.ROOT / "dist"
    for old in dist.glob("cai_*"):
        old.unlink()
    for package in house.PACKAGES:
        house.build(session, package, dist, kinds=("sdist", "wheel"))
    session.log(
        f"{len(list(dist.glob('*.whl')))} wheels and {len(list(dist.glob('*.tar.gz')))} sdists in dist/"
    )
    constraints = house.link_torch(session)
    session.install("-c", str(constraints), "--find-links", str(dist), "cai-zero", "cai-gemini")
    with session.chdir(session.create_tmp()):
        session.run(
            "python", "-c", "import cai_zero, cai_gemini; print(cai_zero.__file__, cai_gemini.__file__)"
        )


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """The documentation, strictly, into site/; `-- serve` shows it while it is written."""
    session.install("mkdocs-material", "mkdocstrings[python]")
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    session.run("mkdocs", *(session.posargs or ["build", "--strict", "--quiet"]))
