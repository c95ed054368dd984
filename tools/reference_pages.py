"""Pages of the documentation that are made from the code: keys of configs, commands, recipes.

mkdocs calls `on_files` (mkdocs.yml names this file under `hooks`). Nothing here imports torch: configs load without it,
and the arguments of commands are read from their syntax trees.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [str(path) for path in sorted((ROOT / "packages").glob("*/src"))]
COMMAND_TEXTS = ("Arguments", "DESCRIPTION", "FLAGS", "USAGE")
"""What a command's module has of these says what it does."""
APPLICATION = "The kind of model that the run is of."
"""Text of the key that is in every file."""
SHARED = """# Config: keys of every run

A run is described by a TOML file. This page lists the keys that every run of the shared training loop has; the page of
each application lists the keys that it adds: [language](config-language.md), [preferences](config-alignment.md),
[classification](config-classification.md), [diffusion](config-diffusion.md), [proteins](config-protein.md),
[recommendation](config-recsys.md). The page is made from the dataclasses that read the file.

```toml
[parallel]
zero = 2
tensor = {{ size = 4, sequence = true }}
```

The same key is a flag of `cai train` and `cai plan`: `--parallel.tensor.size 4`. A key that is true or false means
true without a value: `--parallel.tensor.sequence`. A default of "worked out" means that cai chooses the value before
the ranks start; the run's `config.toml` holds what it chose.

{keys}
**Next:** [every command and its flags](commands.md), or [the recipes](recipes.md) that fill these keys.
"""
COMMANDS = """# Commands

Every command of `cai`, with its arguments and flags. `cai COMMAND --help` prints the same in a terminal. The page is
made from the code of the commands.

A command ends with 0 when it did what it was asked for, with 2 for a mistake of the user's (the message says what to
change), with 1 for any other failure. `--debug`, after any command, shows the traceback of an error.

{commands}
**Next:** [every key of a config](config.md), or [messages and what to do](../troubleshooting.md).
"""
RECIPES = """# Recipes

Configs that ship with cai: `cai train NAME` trains one, `cai plan NAME` says what it needs. Each is a starting point;
flags change any of its keys. Recipes whose name ends in `-tiny` run on a CPU in minutes. The page is made from their
files.

| recipe | application | ranks | what it is |
|---|---|---|---|
{rows}

Ranks are GPUs, or processes on a CPU. A recipe runs on another number of them: `cai train sft-8b --parallel.shard 8`.

**Next:** [every key of a config](config.md), or [does it fit my GPU?](../start/index.md#does-it-fit)
"""


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages to those that mkdocs has found."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Returns the text of every page that is made here, by its path below docs/."""
    sys.path[:0] = [source for source in SOURCES if source not in sys.path]
    from cai_apps import applications

    made = {
        "reference/config.md": shared_page(),
        "reference/commands.md": commands_page(),
        "reference/recipes.md": recipes_page(),
    }
    return made | {f"reference/config-{name}.md": application_page(name) for name in applications.TABLE}


# --- config -----------------------------------------------------------------------------------------


def shared_page() -> str:
    """Returns the page of the keys that every run has."""
    from cai_apps.config.sections import RunConfig

    return SHARED.format(keys="\n".join(section_lines(RunConfig, "")))


def application_page(name: str) -> str:
    """Returns the page of the keys that one application adds."""
    from cai_apps import applications
    from cai_apps.config.sections import RunConfig

    kind = applications.find(name).config
    shared = issubclass(kind, RunConfig)
    origin = (
        "A config has [the keys of every run](config.md) as well."
        if shared
        else "It runs in one process, without the shared loop, and has no other keys."
    )
    return "\n".join(
        [
            f"# Config: {name}",
            "",
            f'Keys that a config with `application = "{name}"` has of its own. {origin}',
            *(["A file that names no application is of this one."] if name == applications.DEFAULT else []),
            "",
            *section_lines(kind, "", besides=RunConfig if shared else None),
            "**Next:** [the keys of every run](config.md), or [the commands](commands.md).",
            "",
        ]
    )


def section_lines(kind: type, prefix: str, besides: type | None = None) -> Iterator[str]:
    """Yields the lines of a dataclass of a config: a table of its keys, then a part for each section inside.

    Args:
        kind: the dataclass.
        prefix: the dotted name of the section, with a dot behind it; empty for the whole config.
        besides: a dataclass whose keys are listed elsewhere and left out here.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    known = typing.get_type_hints(besides, include_extras=True) if besides else {}
    own = set(fields_of(besides)) if besides and prefix else set()
    rows, inner = [], []
    for name, field in fields_of(kind).items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            if known.get(name) is not hint:
                inner.append((name, hint, known.get(name)))
        elif typing.get_origin(hint) is dict:
            if name not in own:
                inner.append((f"{name}.*", typing.get_args(hint)[1], None))
        elif name not in own:
            text = APPLICATION if name == "application" else texts_of(kind).get(name, "")
            rows.append((f"{prefix}{name}", hint, default_text(field), text))
    if rows:
        yield from table_lines(rows)
    for name, hint, elsewhere in inner:
        yield f"## {prefix}{name} {{ #{prefix}{name.removesuffix('.*')} }}"
        yield ""
        if dataclasses.is_dataclass(elsewhere):
            yield f"Beside [its keys in every run](config.md#{prefix}{name}):"
            yield ""
        elif (text := inspect.getdoc(hint)) and not text.startswith(f"{hint.__name__}("):
            yield from (*text.splitlines(), "")
        yield from section_lines(hint, f"{prefix}{name}.", elsewhere)


def table_lines(rows: list[tuple[str, Any, str, str]]) -> Iterator[str]:
    """Yields a table of keys: name, values, default, meaning."""
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    for key, hint, default, text in rows:
        cells = [f'<a id="{key}"></a>`{key}`', type_text(hint), default, in_cell(text)]
        yield f"| {' | '.join(cells)} |"
    yield ""


def fields_of(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """Returns the fields of a dataclass by name."""
    return {field.name: field for field in dataclasses.fields(kind)}


def texts_of(kind: type) -> dict[str, str]:
    """Returns the text that stands below each field of a class, those of its bases included."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            texts |= {name: text for name, _, _, text in fields_in(tree)}
    return texts


def fields_in(tree: ast.AST) -> Iterator[tuple[str, str, str, str]]:
    """Yields (name, annotation, default, text) of each field in the tree of a class."""
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for line, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            text = ""
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                text = inspect.cleandoc(str(below.value.value))
            default = "" if line.value is None else ast.unparse(line.value)
            yield line.target.id, ast.unparse(line.annotation), default, text


def default_text(field: dataclasses.Field[Any]) -> str:
    """Returns the default of a field as it is written in a file."""
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    return "*none or worked out*" if value is None else f"`{toml_text(value)}`"


def toml_text(value: Any) -> str:
    """Returns a value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    return str(value)


NAMES = {str: "text", int: "integer", float: "number", bool: "`true`, `false`", Path: "path"}
"""Words for the types of values."""


def type_text(hint: Any) -> str:
    """Returns the values that a key takes, in words."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        kind, *limits = typing.get_args(hint)
        ranges = [limit for limit in map(str, limits) if limit and not limit.startswith("Filled")]
        return " ".join([type_text(kind), *ranges])
    if origin is typing.Literal:
        return ", ".join(f"`{toml_text(value)}`" for value in typing.get_args(hint))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_text(each) for each in typing.get_args(hint) if each is not type(None))
    if origin is tuple:
        return f"list of {type_text(typing.get_args(hint)[0])}"
    return NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def in_cell(text: str) -> str:
    """Returns text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# --- commands ---------------------------------------------------------------------------------------


def commands_page() -> str:
    """Returns the page of every command of `cai` and its flags."""
    from cai_apps import applications, cli

    lines: list[str] = []
    helps = {name: {"": text} for name, text in cli.COMMANDS.items()}
    helps |= {
        name: {of: text for of, (text, _) in by.items()} for name, by in applications.commands().items()
    }
    for name, by in cli.modules_of_commands().items():
        lines += [f"## cai {name} {{ #{name} }}", ""]
        modules = dict.fromkeys(by.values())
        for module in modules:
            of = [application for application, where in by.items() if where == module]
            lines += command_lines(name, module, [each for each in of if each], helps[name][of[0]])
    return COMMANDS.format(commands="\n".join(lines))


def command_lines(name: str, module: str, applications: list[str], line: str) -> Iterator[str]:
    """Yields the part of a page about one command of some applications."""
    tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
    texts = {kind: node for node in tree.body for kind in COMMAND_TEXTS if kind == name_of(node)}
    if (
        not texts and "language" not in applications
    ):  # a command that hands its task to the language application's
        yield f"For runs of {' and '.join(applications)}: the same arguments ({line})."
        yield ""
        return
    if applications:
        yield f"For models and runs of the {' and '.join(applications)} application{'s' * (len(applications) > 1)}:"
        yield ""
    if usage := texts.get("USAGE"):
        yield from ("```text", literal(usage), "```", "")
        return
    if "DESCRIPTION" in texts:
        yield from (
            f"`cai {name} RECIPE|FILE.toml [FLAGS] [--section.key value]`",
            "",
            f"{line[0].upper()}{line[1:]}.",
        )
        if flags := texts.get("FLAGS"):
            rows = ast.literal_eval(flags.value) if isinstance(flags, ast.Assign) else {}
            yield from ("", "| flag | meaning |", "|---|---|")
            yield from (f"| `{flag}` | {in_cell(text)} |" for flag, text in rows.items())
        yield from ("", "Every [key of a config](config.md) is a flag.", "")
        return
    arguments = texts["Arguments"]
    fields = list(fields_in(arguments))
    places = [each.upper() for each, annotation, *_ in fields if "Positional" in annotation]
    yield f"`cai {' '.join([name, *places, '[FLAGS]'])}`"
    yield ""
    yield from (
        (ast.get_docstring(arguments) or "").splitlines() if isinstance(arguments, ast.ClassDef) else ()
    )
    yield from ("", "| argument | values | default | meaning |", "|---|---|---|---|")
    for field, annotation, default, text in fields:
        flag = f"`{field.upper()}`" if "Positional" in annotation else f"`--{field.replace('_', '-')}`"
        shown = "*none*" if default == "None" else f"`{default}`" if default else "required"
        yield f"| {flag} | {in_cell(annotation_text(annotation))} | {shown} | {in_cell(text)} |"
    yield ""


def source_of(module: str) -> Path:
    """Returns the file of a module that is not imported."""
    places = (Path(source, *module.split(".")).with_suffix(".py") for source in SOURCES)
    return next(path for path in places if path.is_file())


def name_of(node: ast.stmt) -> str:
    """Returns the name that a statement gives, to a class or a value; empty: none."""
    if isinstance(node, ast.ClassDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else ""


def literal(node: ast.stmt) -> str:
    """Returns the text that a statement gives to a name."""
    return str(ast.literal_eval(node.value)) if isinstance(node, ast.Assign) else ""


def annotation_text(annotation: str) -> str:
    """Returns an annotation in words; a name that stands for choices is looked up among those of configs."""
    from cai_apps.config import ranges, sections

    tree = ast.parse(annotation, mode="eval").body
    names = {kind.__name__: kind for kind in NAMES} | vars(ranges) | vars(sections)

    def limit_of(node: ast.expr) -> object:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Range":
            return ranges.Range(
                **{each.arg: ast.literal_eval(each.value) for each in node.keywords if each.arg}
            )
        return names.get(ast.unparse(node))

    def words(node: ast.expr) -> str:
        if isinstance(node, ast.Subscript):
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            match ast.unparse(node.value):
                case "Annotated":
                    limits = [limit_of(limit) for limit in inner[1:]]
                    ranges_told = [str(limit) for limit in limits if isinstance(limit, ranges.Range)]
                    return " ".join([words(inner[0]), *ranges_told])
                case "Literal":
                    return ", ".join(f"`{ast.literal_eval(each)}`" for each in inner)
                case _:
                    return f"list of {words(inner[0])}"
        if isinstance(node, ast.BinOp):
            return " or ".join(text for text in (words(node.left), words(node.right)) if text)
        name = ast.unparse(node)
        return "" if name == "None" else type_text(names.get(name, name))

    return words(tree)


# --- recipes ----------------------------------------------------------------------------------------


def recipes_page() -> str:
    """Returns the page of the recipes that ship with cai."""
    from cai_apps import recipes

    rows = []
    for name in recipes.names():
        config = recipes.load(name)
        cells = [f"`{name}`", config.application, ranks_text(config), in_cell(recipes.describe(name))]
        rows.append(f"| {' | '.join(cells)} |")
    return RECIPES.format(rows="\n".join(rows))


def ranks_text(config: Any) -> str:
    """Returns the number of ranks that a config makes."""
    parallel = getattr(config, "parallel", None)
    if parallel is None:
        return "1"
    others = parallel.replicate * parallel.context.size * parallel.tensor.size * parallel.pipeline.size
    if parallel.shard != -1:
        return str(parallel.shard * others)
    return "any number" if others == 1 else f"a multiple of {others}"
