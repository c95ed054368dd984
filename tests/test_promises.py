"""What the code of no package does, read from every syntax tree: SECURITY.md names the promises."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "packages").glob("*/src/**/*.py"))


@dataclass(frozen=True)
class Rule:
    """A call that is forbidden, or that must have a keyword of one value.

    Args:
        names: of calls, dotted as they are written; `*` at an end stands for anything.
        keyword: the keyword; None: the call is forbidden.
        value: the keyword must have.
        but: files, by the ends of their paths, that the rule does not hold for.
        unless: names that the rule does not hold for.
    """

    names: tuple[str, ...]
    keyword: str | None = None
    value: object = None
    but: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()


PIPES = ("cai_mesh/testing/pool.py", "cai_mesh/testing/rank.py")
"""They unpickle what comes through pipes between processes and those that they have started."""
DIFFUSERS = ("AutoencoderKL.from_pretrained", "AutoencoderKL.from_config")
"""Classes of diffusers, which knows no code from elsewhere here, and no such keyword."""
FORBIDDEN = (
    Rule(("eval", "exec", "compile", "builtins.eval", "builtins.exec", "__import__")),
    Rule(("os.system", "os.popen", "os.exec*", "os.spawn*", "commands.*")),
    Rule(("yaml.*", "marshal.load*", "shelve.open", "dill.*", "joblib.load", "cloudpickle.*")),
    Rule(("pickle.load", "pickle.loads"), but=PIPES),
    Rule(("tempfile.mktemp", "tarfile.*", "shutil.unpack_archive", "zipfile.*.extractall")),
    Rule(("torch.hub.*", "subprocess.getoutput", "subprocess.getstatusoutput")),
)
REQUIRED = (
    Rule(("torch.load",), "weights_only", True),
    Rule(("np.load", "numpy.load"), "allow_pickle", False),
    Rule(("Auto*.from_pretrained", "Auto*.from_config"), "trust_remote_code", False, unless=DIFFUSERS),
    Rule(("*Tokenizer.from_pretrained", "*TokenizerFast.from_pretrained"), "trust_remote_code", False),
)
CONSTANTS = {"trust_remote_code": False, "shell": False, "weights_only": True, "allow_pickle": False}
"""What a keyword is wherever it is written, of whatever call."""


def dotted(node: ast.AST) -> str:
    """How a name is written: `a.b.c`; a part that is no name is left empty."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_named(name: str, rule: Rule) -> bool:
    def fits(pattern: str) -> bool:
        if pattern.startswith("Auto*"):
            last = name.split(".")[-2:]
            return len(last) == 2 and last[0].startswith("Auto") and last[1] == pattern[6:]
        if pattern.startswith("*"):
            return name.endswith(pattern[1:])
        return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern

    return name not in rule.unless and any(map(fits, rule.names))


def nodes_of(source: str) -> list[ast.AST]:
    """Calls and imports."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call | ast.ImportFrom)]


def breaches(nodes: list[ast.AST], path: str = "") -> Iterator[str]:
    """Each call that breaks a rule, with its line."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        for rule in (*FORBIDDEN, *REQUIRED):
            if not is_named(name, rule) or path.endswith(rule.but or ("\0",)):
                continue
            value = given.get(rule.keyword) if rule.keyword else None
            if not isinstance(value, ast.Constant) or value.value is not rule.value:
                yield f"{path}:{node.lineno}: {name}"
        for keyword, value in CONSTANTS.items():
            found = given.get(keyword)
            if found is not None and not (isinstance(found, ast.Constant) and found.value is value):
                yield f"{path}:{node.lineno}: {name}({keyword}=...)"


def foreign_names(nodes: list[ast.AST]) -> set[str]:
    """Names that `from MODULE import NAME` takes where a rule forbids or restricts MODULE.NAME."""
    taken = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            taken |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in taken if any(is_named(name, rule) for rule in (*FORBIDDEN, *REQUIRED))}


@pytest.fixture(scope="module")
def trees() -> dict[str, list[ast.AST]]:
    """The nodes that rules are about, by file; each is parsed once."""
    assert SOURCES
    return {str(path.relative_to(ROOT)): nodes_of(path.read_text()) for path in SOURCES}


def test_no_source_breaks_a_rule(trees):
    assert not [line for path, nodes in trees.items() for line in breaches(nodes, path)]


def test_no_source_takes_a_restricted_name_by_itself(trees):
    """`from torch import load` would be a call that the rules do not see."""
    assert not {path: names for path, nodes in trees.items() if (names := foreign_names(nodes))}


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "exec(code)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=maybe)",
        "yaml.load(file)",
        "yaml.safe_load(file)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "torch.load(file, weights_only=flag)",
        "np.load(file)",
        "np.load(file, allow_pickle=True)",
        "pickle.loads(raw)",
        "pickle.load(file)",
        "AutoConfig.from_pretrained(name)",
        "transformers.AutoModelForCausalLM.from_config(config)",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=None)",
        "CLIPTokenizer.from_pretrained(name)",
        "kind.from_pretrained(name, trust_remote_code=True)",
        "tempfile.mktemp()",
        "tarfile.open(path)",
    ],
)
def test_the_walk_sees(source: str):
    assert list(breaches(nodes_of(source)))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "re.compile('a')",
        "torch.compile(model)",
        "torch.load(file, weights_only=True)",
        "np.load(file, allow_pickle=False)",
        "AutoConfig.from_pretrained(name, trust_remote_code=False)",
        "AutoencoderKL.from_pretrained(home)",
        "subprocess.run(['ls'], shell=False)",
    ],
)
def test_the_walk_allows(source: str):
    assert not list(breaches(nodes_of(source)))


def test_the_walk_sees_names_that_are_imported():
    assert foreign_names(nodes_of("from torch import load\nfrom os import system\nfrom os import path")) == {
        "torch.load",
        "os.system",
    }


def test_every_promise_names_a_test_that_is_there():
    text = (ROOT / "SECURITY.md").read_text().partition("## What is promised")[2]
    promises = text.partition("\n## ")[0].split("\n- ")[1:]
    assert len(promises) > 8
    for promise in promises:
        named = [part for part in promise.split("`") if "::" in part]
        assert named, promise
        for path, _, test in (name.partition("::") for name in named):
            assert f"def {test}(" in (ROOT / path).read_text(), test
