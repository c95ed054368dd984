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
from tools.side_by_side import Job
from tools.side_by_side import run as run_side_by_side

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
TEST_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CAI_TESTS_LOCK": str(house.CACHE / "tests.lock"),
    "PYTEST_TIMEOUT": "600",  # a test may wait for another session's that fills the machine (decision 50)
}


@nox.session(reuse_venv=True)
def train(session: nox.Session) -> None:
    """Train the small LLaMA on real text; `-- RECIPE --section.key value` trains something else."""
    house.install_everything(session, third_party=False)
    session.run("cai", "train", *(session.posargs or ["llama-tiny"]))


def _pytest(suite: str) -> list[str]:
    """The command that runs a suite: a package, `faults`, or `rest`."""
    paths = [house.tests_of(suite)] if suite in house.PACKAGES else house.suite(suite)
    return ["python", "-m", "pytest", *paths]


@nox.session
def ci(session: nox.Session) -> None:
    """Check everything, two sessions at a time; what CI runs, from a clean checkout too."""
    house.share(session)
    nox_command = [sys.executable, "-m", "nox", "-s"]
    jobs = [Job(name, [*nox_command, *names]) for name, names in house.CI.items()]
    if not run_side_by_side(jobs):
        session.error("a session failed")


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """The whole suite in one environment, two parts at a time; arguments go to pytest."""
    house.install_everything(session)
    if session.posargs:
        session.run("python", "-m", "pytest", *session.posargs, env=TEST_ENVIRONMENT)
        return
    python = str(Path(session.bin) / "python")
    environment = TEST_ENVIRONMENT | {"PATH": f"{session.bin}{os.pathsep}{os.environ['PATH']}"}
    jobs = [
        Job(suite, [python, *_pytest(suite)[1:]], environment | {"CAI_TESTS_BUDGET": suite})
        for suite in house.SUITES
    ]
    if not run_side_by_side(jobs):
        session.error("tests failed")


@nox.session(reuse_venv=True)
@nox.parametrize("suite", house.FURTHER, ids=house.FURTHER)
def rest(session: nox.Session, suite: str) -> None:
    """The tests that neither `alone` nor `pairs` runs: the house's rules, loops and examples, runs with faults."""
    house.install_everything(session)
    session.run(*_pytest(suite), env=TEST_ENVIRONMENT | {"CAI_TESTS_BUDGET": suite})


@nox.session(reuse_venv=True)
def quick(session: nox.Session) -> None:
    """Lint, types and the tests that a change reaches by imports, nearest first, for eight minutes at most.

    `-- --base REV` says since when; default: what is not committed, or else the last commit.
    """
    session.notify("lint", posargs=[])
    house.install_everything(session)
    session.run("python", "tools/reach.py", *session.posargs, env=TEST_ENVIRONMENT)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """ruff's rules and format, and pyright over the sources."""
    constraints = house.link_torch(session)  # without Triton, whose annotations refuse correct kernels
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
    clean: bool,
) -> None:
    """Install `packages` alone with test `tools`, see that no other sibling came along, and run `tests`.

    Args:
        clean: whether the environment has no third-party package that they do not declare, either.
    """
    path = house.ROOT / tests
    content = [
        *wheels.values(),
        path if path.is_dir() else path.parent,
        house.ROOT / "pyproject.toml",
        house.ROOT / "conftest.py",
        house.ROOT / "tests" / "matrix.toml",
        house.ROOT / house.README,
        house.ROOT / "tests" / "page_blocks.py",
    ]
    content += [house.ROOT / "packages" / package / "README.md" for package in packages]
    key = house.digest(content)
    if house.shown(check, key) and "--force" not in session.posargs:
        session.skip(f"{check} passed before on this content; -- --force runs it again")
    requirements = [*house.test_requirements(*packages), *tools]
    house.install_wheels(session, packages, wheels, *requirements, clean=clean)
    declared = {
        *packages,
        *(requirement.name for package in packages for requirement in house.siblings(package)),
    }
    absent = [house.module(name) for name in house.PACKAGES if name not in declared]
    session.run("python", "-c", ABSENT, *absent)
    environment = TEST_ENVIRONMENT | {"PYTHONPATH": ""}
    suite = packages[0] if len(packages) == 1 else Path(tests).stem
    session.run("python", "-m", "pytest", tests, env=environment | {"CAI_TESTS_BUDGET": suite})
    if len(packages) == 1:
        session.run("python", "-m", "pytest", house.README, "-k", f"packages/{packages[0]}/", env=environment)
    house.record(check, key)


@nox.session
@nox.parametrize("package", house.PACKAGES, ids=house.PACKAGES)
def alone(session: nox.Session, package: str) -> None:
    """A built wheel, in an environment with only what it declares, runs its own tests and README.

    cai-apps shares the third-party packages: it declares nearly all of them.
    """
    needed = {package, *(requirement.name for requirement in house.siblings(package))}
    wheels = {name: house.wheel(session, name) for name in sorted(needed)}
    clean = package != "cai-apps"
    _prove(session, f"alone({package})", [package], wheels, house.tests_of(package), clean=clean)


@nox.session
@nox.parametrize("pair", house.PAIRS, ids=house.PAIRS)
def pairs(session: nox.Session, pair: str) -> None:
    """Two packages, or three, and cai-mesh, and nothing else of ours, in a foreign loop."""
    packages = [PAIRS[word] for word in pair.split("_x_")]
    wheels = {name: house.wheel(session, name) for name in ["cai-mesh", *packages]}
    _prove(session, f"pairs({pair})", packages, wheels, house.tests_of_pair(pair), clean=False)


WITH_SIBLINGS = [package for package in house.PACKAGES if house.siblings(package)]


@nox.session
@nox.parametrize("package", WITH_SIBLINGS, ids=WITH_SIBLINGS)
def compat(session: nox.Session, package: str) -> None:
    """A package as it stands against the oldest released siblings its requirements admit."""
    wheels = {package: house.wheel(session, package)}
    wheels |= {
        need.name: house.wheel(session, need.name, house.oldest(need)) for need in house.siblings(package)
    }
    _prove(session, f"compat({package})", [package], wheels, house.tests_of(package), clean=True)


OLDEST_TRITON = "triton==3.6.*"  # as cai-kernels[triton] admits


@nox.session(reuse_venv=True)
def oldest(session: nox.Session) -> None:
    """Kernels compile for a Hopper GPU with the oldest Triton, too."""
    house.install_everything(session)
    session.install(OLDEST_TRITON)
    session.run(
        "python",
        "-m",
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
    house.install_everything(session)
    session.install(OLDEST_TORCH)
    session.run(
        *("python", "-m", "pytest", "packages/cai-apps/tests/run", "tests/faults"),
        *session.posargs,
        env=TEST_ENVIRONMENT,
    )


@nox.session(reuse_venv=True)
def matrix(session: nox.Session) -> None:
    """Whole products of options; resumable, results in docs/proof/matrix.json; `-- --force` repeats."""
    house.install_everything(session)
    # pytest ends with 5 when every case is recorded already.
    session.run(
        "python",
        "-m",
        "pytest",
        "tests/matrix",
        "tests/test_plan_of_kernels.py",
        "tests/faults",
        "tests/pairs",
        "tests/loops",
        "packages/cai-zero/tests",
        "packages/cai-apps/tests",
        "packages/cai-kernels/tests",
        "packages/cai-tensor-parallel/tests",
        "packages/cai-pipeline/tests",
        "packages/cai-gemini/tests",
        "packages/cai-mesh/tests",
        "-m",
        "matrix and not gpu",
        *session.posargs,
        env=TEST_ENVIRONMENT,
        success_codes=[0, 5],
    )


@nox.session(reuse_venv=True)
def sweep(session: nox.Session) -> None:
    """Every causal LM of transformers against a plain loop; resumable, results in docs/proof/sweep.json."""
    house.install_everything(session)
    session.run("python", "tests/sweep/table.py", *session.posargs, env=TEST_ENVIRONMENT)


TUTORIALS = {
    "docs/fine-tuning.md": "test_the_tutorial_is_followed_to_the_letter",
    "docs/alignment.md": "test_the_tutorial_of_preferences_is_followed_to_the_letter",
} | {
    f"docs/start/{name}.md": f"test_getting_started_is_followed_to_the_letter[{name}]"
    for name in ("index", "one-gpu", "larger-than-the-gpu", "several-gpus", "own-loop")
}
TUTORIALS |= {
    f"docs/tutorials/{page.name}": f"test_a_tutorial_is_followed_to_the_letter[{page.stem}]"
    for page in sorted((house.ROOT / "docs" / "tutorials").glob("*.md"))
    if page.stem not in ("index", "kubernetes", "notebooks")
}
TUTORIALS |= {
    "docs/tutorials/kubernetes.md": "manifest",
    "docs/hugging-face.md": "test_the_page_of_hugging_face_is_followed_to_the_letter",
}
"""Pages that are followed command by command, and which tests of tests/test_tutorials.py do so."""
BESIDE_TUTORIALS = ("kubernetes", "pyyaml", "datasets", "pytorch-lightning", "nbclient", "ipykernel")
"""What their tests need beside what the packages and their tests declare."""


@nox.session(reuse_venv=True)
def tutorials(session: nox.Session) -> None:
    """Every page that is followed to the letter, each once for its text and the sources; `-- --force` repeats."""
    house.install_everything(session)
    session.install(*BESIDE_TUTORIALS)
    sources = [house.ROOT / "packages" / name / "src" for name in house.PACKAGES]
    for page, test in TUTORIALS.items():
        check, key = f"tutorial({page})", house.digest([house.ROOT / page, *sources])
        if house.shown(check, key) and "--force" not in session.posargs:
            session.log(f"{page} was followed before, as it is")
            continue
        command = (
            "python",
            "-m",
            "pytest",
            "tests/test_tutorials.py",
            "-k",
            test,
            "-m",
            "matrix or not matrix",
        )
        session.run(*command, env=TEST_ENVIRONMENT)
        house.record(check, key)
    session.run("python", "-m", "pytest", "tests/test_notebooks.py", "-m", "matrix", env=TEST_ENVIRONMENT)


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
    session.run("python", "tools/wheels.py", str(dist))
    constraints = house.link_torch(session)
    session.install("-c", str(constraints), "--find-links", str(dist), "cai-zero", "cai-gemini")
    with session.chdir(session.create_tmp()):
        session.run(
            "python", "-c", "import cai_zero, cai_gemini; print(cai_zero.__file__, cai_gemini.__file__)"
        )


STRICT = ("build", "--strict")
"""The command of mkdocs that a warning fails: --quiet would hide warnings from --strict too."""


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """The documentation, strictly, into site/; `-- serve` shows it while it is written."""
    session.install("mkdocs<2", "mkdocs-material", "mkdocstrings[python]")
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    if not session.posargs:
        broken = _broken_page(Path(session.create_tmp()) / "broken")
        session.run("mkdocs", *STRICT, "--config-file", str(broken), success_codes=[1], silent=True)
    session.run("mkdocs", *(session.posargs or STRICT))


def _broken_page(directory: Path) -> Path:
    """Write a page whose only fault is a warning, which must fail; returns its configuration."""
    (directory / "docs").mkdir(parents=True, exist_ok=True)
    (directory / "docs" / "index.md").write_text("[a page](that-is-nowhere.md)\n")
    configuration = directory / "mkdocs.yml"
    configuration.write_text("site_name: broken\n")
    return configuration
