"""Names are nouns of the field and docstrings whole sentences: counts over all sources whose budgets only fall.

Counted are names that are bound, by an assignment or as an argument, in packages/*/src. `python tests/test_names.py`
prints the counts, and `python tests/test_names.py vague FILE...` where those of one kind stand.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.source_trees import SOURCES, tree_of

ROOT = Path(__file__).resolve().parent.parent
VAGUE = {
    "found", "held", "given", "told", "said", "there", "here", "each", "own", "made", "known", "taken",
    "alike", "whole", "beside", "others", "kept", "asked", "wanted", "cut", "fresh", "seen", "left",
    "shown", "gone", "come",
}  # fmt: skip
"""Participles and adverbs, which say nothing of the thing that bears them."""
EMPTY = {"result", "results", "item", "items", "info"}
SHORTENED = {"res", "ret", "tmp", "temp", "obj", "val"}
PREPOSITIONS = {
    "of", "in", "on", "at", "by", "for", "from", "to", "with", "without", "within", "into", "onto", "over",
    "under", "per", "after", "before", "beside", "between", "behind", "through", "until", "since", "during",
    "against", "above", "below", "across", "along", "among", "around",
}  # fmt: skip
QUESTIONS = {"what", "which", "who", "whose", "how", "when", "where", "why"}
BUDGETS = {
    "vague": 90,
    "empty": 59,
    "shortened": 0,
    "numbered": 8,
    "one letter": 1996,
    "descriptions with a preposition": 1,
    "descriptions with a question word": 1,
    "docstrings with a preposition": 0,
}
"""How often each may occur. A change that lowers a count lowers its budget."""

Place = tuple[int, str]
"""Line and what stands there."""


def bound(tree: ast.AST) -> Iterator[Place]:
    """Yield every name that is assigned, and every argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def stripped(name: str) -> str:
    """Return a name without outer underscores and trailing digits."""
    return name.strip("_").rstrip("0123456789").strip("_")


def is_vague(name: str) -> bool:
    """Return whether every word of a name is a participle or an adverb."""
    return bool(stripped(name)) and all(word in VAGUE for word in stripped(name).split("_"))


def is_numbered(name: str) -> bool:
    """Return whether a name is up to three letters and a number, as `x1` is."""
    return re.fullmatch(r"_*[A-Za-z]{1,3}\d+_*", name) is not None


NAMES: dict[str, Callable[[str], bool]] = {
    "vague": is_vague,
    "empty": lambda name: name.strip("_") in EMPTY,
    "shortened": lambda name: name.strip("_") in SHORTENED,
    "numbered": is_numbered,
    "one letter": lambda name: len(name) == 1 and name != "_",
}


def docstrings(tree: ast.AST) -> Iterator[Place]:
    """Yield the docstrings of modules, classes, functions, and of the names above them."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(getattr(value, "value", None), str):
                yield statement.lineno, value.value


def descriptions(text: str) -> Iterator[str]:
    """Yield what a docstring says of each argument and attribute."""
    section = re.compile(r"^\s*(Args|Attributes|Keyword Args):\n((?:\s*\n|[ \t]+.*\n?)+)", re.M)
    for match in section.finditer(text):
        lines = match.group(2).splitlines()
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        for line in lines:
            entry = re.match(rf"^ {{{indent}}}[\w*, ]+: (.+)", line)
            if entry:
                yield entry.group(1)


def first_word(text: str) -> str:
    """Return the first word, in small letters."""
    match = re.match(r"\W*([A-Za-z]+)", text)
    return match.group(1).lower() if match else ""


@functools.cache
def counted(path: Path) -> tuple[list[Place], list[Place]]:
    """Return the names that a file binds, and its docstrings."""
    return list(bound(tree_of(path))), list(docstrings(tree_of(path)))


def occurrences(kind: str, path: Path) -> list[Place]:
    """Return where a file has what a budget counts."""
    names, texts = counted(path)
    if kind in NAMES:
        return [place for place in names if NAMES[kind](place[1])]
    words = QUESTIONS if kind.endswith("question word") else PREPOSITIONS
    if kind.startswith("docstrings"):
        return [(line, text.strip()[:80]) for line, text in texts if first_word(text) in words]
    told = ((line, entry) for line, text in texts for entry in descriptions(text))
    return [(line, entry) for line, entry in told if first_word(entry) in words]


@pytest.mark.parametrize("kind", BUDGETS)
def test_the_count_is_within_its_budget(kind: str):
    count = sum(len(occurrences(kind, path)) for path in SOURCES)
    assert count <= BUDGETS[kind], f"{kind}: {count}; `python tests/test_names.py {kind!r} FILES` says where"


def test_the_count_sees_what_it_is_for(tmp_path: Path):
    path = tmp_path / "names.py"
    path.write_text(
        '"""Of the module.\n\nArgs:\n    one: of the scheduler.\n    two: what it was.\n    three: whether so.\n"""\n'
        "def f(_found, own_2, res, x1, k):\n    items = held_here = kept_rows = 1\n"
    )
    count = {kind: [what for _, what in occurrences(kind, path)] for kind in BUDGETS}
    assert sorted(count["vague"]) == ["_found", "held_here", "own_2"]
    assert (count["empty"], count["shortened"], count["numbered"]) == (["items"], ["res"], ["x1"])
    assert count["one letter"] == ["k"]
    assert count["descriptions with a preposition"] == ["of the scheduler."]
    assert count["descriptions with a question word"] == ["what it was."]
    assert len(count["docstrings with a preposition"]) == 1


if __name__ == "__main__":
    kind, files = (sys.argv[1], [Path(name) for name in sys.argv[2:]]) if len(sys.argv) > 1 else (None, [])
    for path in (files or SOURCES) if kind else ():
        print(*(f"{path}:{line}: {what}" for line, what in occurrences(str(kind), path)), sep="\n")
    for each in BUDGETS if kind is None else ():
        rows = {
            p.name: sum(len(occurrences(each, f)) for f in p.rglob("src/**/*.py"))
            for p in ROOT.glob("packages/*")
        }
        print(f"{each}: {sum(rows.values())}  {rows}")
