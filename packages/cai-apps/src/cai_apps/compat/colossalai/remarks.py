"""What a script's arguments and imports mean here where that is something else than there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from cai_apps.compat.colossalai.absent import MODULES
from cai_apps.compat.colossalai.arguments import PLUGINS, REFUSED, meaning
from cai_apps.compat.colossalai.rewriting import is_theirs
from cai_apps.compat.colossalai.signatures import SIGNATURES


def remarks(source: str) -> list[str]:
    """Return lines "LINE: what" about a script: options without effect, refused ones, and modules that are not here.

    Args:
        source: the text of the script.
    """
    return sorted(_remarks(ast.parse(source)), key=lambda line: int(line.split(":")[0]))


def _remarks(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and is_theirs(node.module):
            yield from _of_module(node.lineno, node.module or "")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_theirs(alias.name):
                    yield from _of_module(node.lineno, alias.name)


def _of_module(line: int, module: str) -> Iterator[str]:
    path = module.removeprefix("colossalai").lstrip(".")
    absent = next((name for name in MODULES if path == name or path.startswith(f"{name}.")), None)
    if absent is not None:
        yield f"{line}: {module} is not here; instead: {MODULES[absent]}"


def _of_call(node: ast.Call) -> Iterator[str]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in PLUGINS:
        return
    for keyword in node.keywords:
        option = keyword.arg
        if option is None:
            continue
        what = f"{keyword.lineno}: {name}({option}=...)"
        is_set = not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None)
        if option not in SIGNATURES[name]:
            yield f"{what} is no option of it"
        elif option in REFUSED and is_set:
            yield f"{what} is refused: {REFUSED[option]}"
        elif option in PLUGINS[name].no_effect or meaning(name, option).differs:
            yield f"{what}: {meaning(name, option).text}"
