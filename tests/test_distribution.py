"""What is handed out: the images' file, the workflows, the wheels' metadata and the changelogs."""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import house, wheels

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
LINES = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def admitted(path: str) -> bool:
    """Whether .dockerignore lets a path of the repository into an image; its last line that matches decides."""
    answer = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if pattern == "*" or pattern == path.split("/")[0] or Path(path).match(pattern):
            answer = line.startswith("!")
    return answer


def test_what_the_images_copy_is_there_and_is_sent():
    copied = [line.split()[1] for line in LINES if line.startswith("COPY ") and "--from" not in line]
    assert copied == ["packages", "LICENSE"]
    assert all((ROOT / path).exists() and admitted(path) for path in copied)
    assert not admitted("docs") and not admitted("packages/cai-zero/tests")
    stages = [line.split()[-1] for line in LINES if line.startswith("FROM ")]
    assert stages == ["wheels", "base", "cpu", "cuda"]
    assert {line.split("--from=")[1].split()[0] for line in LINES if "--from=" in line} <= set(stages)


def test_the_images_install_what_the_packages_offer():
    """Extras that exist, the torch that every package asks for, a Python that they admit."""
    extras = {
        (name, extra.strip())
        for name, listed in re.findall(r"(cai-\w+)\[([\w,]+)\]", DOCKERFILE)
        for extra in listed.split(",")
    }
    assert extras and all(
        extra in house.project(name)["project"]["optional-dependencies"] for name, extra in extras
    )
    asked = {line for name in house.PACKAGES for line in house.project(name)["project"]["dependencies"]}
    torches = {line for line in asked if line.startswith(("torch>", "torch="))}
    assert set(re.findall(r'pip install "(torch[^"]+)"', DOCKERFILE)) == torches
    pythons = set(re.findall(r"FROM python:([\d.]+)-", DOCKERFILE))
    assert pythons == {house.project("cai-zero")["project"]["requires-python"].removeprefix(">=")}


def test_images_run_as_an_ordinary_user_and_pin_what_they_are_of():
    for target in ("cpu", "cuda"):
        lines = DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0].splitlines()
        assert [line for line in lines if line and not line.startswith("#")][-1] == "USER cai"
    assert ":latest" not in DOCKERFILE and not re.search(r"^FROM python:\S*$", DOCKERFILE, re.M)
    assert "ADD " not in DOCKERFILE and "curl" not in DOCKERFILE


def steps(workflow: Path) -> list[dict[str, Any]]:
    """The steps of all jobs of a workflow."""
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_their_versions_told(workflow: Path):
    used = re.findall(r"uses: (\S+)(.*)", workflow.read_text())
    assert used
    assert not [name for name, told in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)]
    assert not [name for name, told in used if not re.fullmatch(r" # v\d+\.\d+\.\d+", told)]
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}


def test_a_release_is_attested_and_has_no_password():
    release = ROOT / ".github" / "workflows" / "release.yml"
    text = release.read_text()
    told = yaml.safe_load(text)
    assert "secrets." not in text and "password" not in text.split("jobs:")[1]
    assert told["jobs"]["publish"]["permissions"] == {"id-token": "write", "attestations": "write"}
    assert told["jobs"]["publish"]["environment"]["name"] == "pypi"
    names = [step.get("uses", "").split("@")[0] for step in steps(release)]
    assert names.index("actions/attest-build-provenance") < names.index("pypa/gh-action-pypi-publish")
    assert steps(release)[-1]["with"] == {"attestations": True}
    (pattern,) = told[True]["push"]["tags"]  # YAML reads the key `on` as true
    assert all(
        re.fullmatch(pattern.replace("*", ".*"), f"{name}-v{house.version(name)}") for name in house.PACKAGES
    )


@pytest.mark.parametrize("package", house.PACKAGES)
def test_a_package_says_what_an_index_shows(package: str):
    folder = ROOT / "packages" / package
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert (folder / project["readme"]).is_file() and (
        folder / "src" / house.module(package) / "py.typed"
    ).is_file()
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    assert all(any(each.startswith(start) for each in project["classifiers"]) for start in wheels.CLASSIFIERS)
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("package", house.PACKAGES)
def test_a_changelog_has_the_version_that_is_released_next(package: str):
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    assert text.startswith(f"# Changelog of {package}\n")
    assert re.search(rf"^## {re.escape(str(house.version(package)))}$", text, re.M)


METADATA = """Metadata-Version: 2.4
Name: cai-zero
Version: 0.1.0
Summary: a sentence
Requires-Python: >=3.11
License-Expression: Apache-2.0
License-File: LICENSE
Keywords: zero
Classifier: Development Status :: 4 - Beta
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Typing :: Typed
Description-Content-Type: text/markdown

"""


def wheel_of(folder: Path, metadata: str, *without: str, more: str = "") -> Path:
    """Write a wheel by hand."""
    path = folder / "cai_zero-0.1.0-py3-none-any.whl"
    about = "cai_zero-0.1.0.dist-info"
    files = {
        "cai_zero/__init__.py": "",
        "cai_zero/py.typed": "",
        f"{about}/licenses/LICENSE": "",
        f"{about}/METADATA": metadata + "a text " * 100,
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            if not any(name.endswith(end) for end in without):
                archive.writestr(name, text)
        if more:
            archive.writestr(more, "")
    return path


def test_a_wheel_as_it_should_be_has_no_fault(tmp_path: Path):
    assert list(wheels.faults(wheel_of(tmp_path, METADATA))) == []


@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        ("py.typed", {"without": ("py.typed",)}),
        ("text of the license", {"without": ("LICENSE",)}),
        ("no metadata", {"without": ("METADATA",)}),
        ("installs more", {"more": "tests/test_zero.py"}),
        ("no Keywords", {"cut": "Keywords: zero\n"}),
        ("'Typing :: Typed'", {"cut": "Classifier: Typing :: Typed\n"}),
        ("Markdown", {"cut": "Description-Content-Type: text/markdown\n"}),
    ],
)
def test_a_fault_of_a_wheel_is_told(tmp_path: Path, fault: str, changes: dict[str, Any]):
    metadata = METADATA.replace(changes.get("cut", "\0"), "")
    wheel = wheel_of(tmp_path, metadata, *changes.get("without", ()), more=changes.get("more", ""))
    assert [each for each in wheels.faults(wheel) if fault in each]


def test_a_folder_without_wheels_is_a_fault(tmp_path: Path):
    assert wheels.main(str(tmp_path)) == 1
