"""The documentation's check can fail: it is strict, hides no warning, and sees a page that must fail it first."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cai_apps import applications, cli, recipes
from cai_apps.config import file as config_file
from tools import concept_pictures, measured, reference_pages

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


# --- what pages say of the code --------------------------------------------------------------------


def quoted(page: Path) -> list[str]:
    """The messages that a page explains."""
    lines = re.findall(r"^\*\*`.*", page.read_text(), re.M)
    return [message for line in lines for message in re.findall(r"`([^`]+)`", line.partition("** (")[0])]


def is_raised(message: str, sources: str) -> bool:
    """Whether a line of the code has the words of a message, with something filled in where the page has `…`."""
    return re.search(".+".join(map(re.escape, message.split("…"))), sources) is not None


def test_troubleshooting_quotes_messages_of_the_code():
    sources = "\n".join(path.read_text() for path in (ROOT / "packages").glob("*/src/**/*.py"))
    explained = quoted(ROOT / "docs" / "troubleshooting.md")
    assert len(explained) > 30
    assert not [message for message in explained if not is_raised(message, sources)]
    assert not is_raised("the device has too few memory", sources)


def test_what_hugging_faces_page_says_is_refused_is_refused_by_the_code():
    """Each message in a table of refusals; the few rows that quote none have words of their own."""
    sources = "\n".join(path.read_text() for path in (ROOT / "packages").glob("*/src/**/*.py"))
    page = (ROOT / "docs" / "hugging-face.md").read_text()
    tables = re.findall(r"^\| refused \|.*?(?=^$)", page, re.M | re.S)
    rows = [row.split(" | ") for table in tables for row in table.splitlines()[2:]]
    told = [message for row in rows for message in re.findall(r"^`([^`]+)`$", row[1])]
    assert len(tables) == 5 and len(told) > 9
    assert not [message for message in told if not is_raised(message, sources)]


def test_the_measured_figures_are_in_their_files():
    """And in the table of the home page; the picture is the one that is drawn from them."""
    assert measured.PICTURE.read_text() == measured.draw()
    text = (ROOT / "docs" / "index.md").read_text()
    assert all(f"{row.ours:,}" in text and f"{row.theirs:,}" in text for row in measured.ROWS)
    with pytest.raises(ValueError, match="is not in"):
        measured.check(measured.Row("made up", "nobody", 1234567, 1, "wide-llama-8b-4xH200"))


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """The pages that are made from the code."""
    return reference_pages.pages()


def test_every_key_is_on_its_page_with_a_text(made):
    for name in applications.TABLE:
        kind = applications.find(name).config
        text = made["reference/config.md"] + made[f"reference/config-{name}.md"]
        keys = config_file.known_keys(kind)
        assert not [key for key in keys if f"`{key}`" not in text], name
    rows = re.findall(r"^\| <a id.*", "".join(made.values()), re.M)
    bare = [row for row in rows if row.endswith("|  |")]
    assert len(rows) > 200 and not bare


def test_every_command_is_on_its_page_with_its_flags(made):
    text = made["reference/commands.md"]
    assert not [name for name in cli.modules_of_commands() if f"## cai {name} " not in text]
    assert "`--repetition-penalty` | number above 0 | `1.0` |" in text
    assert '`--base` | `"compute"`, `"nf4"`, `"int8"`' in text
    assert not [name for name in recipes.names() if f"| `{name}` |" not in made["reference/recipes.md"]]


@pytest.mark.parametrize("package", ["zero", "tensor_parallel", "pipeline", "gemini", "kernels"])
def test_every_public_name_is_on_the_page_of_its_package_once(package):
    text = (ROOT / "docs" / "packages" / f"cai-{package.replace('_', '-')}.md").read_text()
    module = importlib.import_module(f"cai_{package}")
    listed = re.findall(rf"^::: cai_{package}\.(\w+)$", text, re.M)
    advertised = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
    assert sorted(name for name in listed if name in module.__all__) == sorted(advertised)


WRITTEN = ("loops.md", "models.md", "heads.md")
"""Pages that tests write: tables of results."""


def own_pages() -> list[Path]:
    """Pages that people write and users read: no decisions, no proofs."""
    docs = ROOT / "docs"
    apart = ("adr", "proof")
    return [
        page
        for page in sorted(docs.rglob("*.md"))
        if page.relative_to(docs).parts[0] not in apart and page.name not in WRITTEN
    ]


@pytest.mark.parametrize("page", own_pages(), ids=lambda page: page.stem)
def test_a_page_opens_with_its_purpose_and_ends_with_what_comes_next(page):
    title, opening, *_ = [line for line in page.read_text().splitlines() if line.strip()]
    assert title.startswith("# ") and re.match(r"[A-Z`\[c]", opening), (
        "a sentence, before any heading, table or code"
    )
    assert "**Next:**" in page.read_text()


def test_every_picture_of_the_concepts_is_drawn_and_shown():
    text = (ROOT / "docs" / "concepts" / "index.md").read_text()
    assert {*re.findall(r"\((\w+)\.svg\)", text)} == {*concept_pictures.PICTURES}
    for draw in concept_pictures.PICTURES.values():
        assert ElementTree.fromstring(draw()).tag.endswith("svg")
