"""The face of a package: what it advertises stays what it is, and its siblings take nothing else."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.source_trees import SOURCES, tree_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.name.replace("-", "_") for path in (ROOT / "packages").iterdir() if path.is_dir())


def test_no_module_takes_the_name_of_what_its_package_advertises():
    script = Path(__file__).with_name("shadowed_names.py")
    outwards = sorted(PACKAGES, key=lambda package: (package == "cai_apps", package != "cai_mesh"))
    run = subprocess.run([sys.executable, str(script), *outwards], capture_output=True, text=True)
    assert run.returncode == 0 and not run.stdout.strip(), run.stdout + run.stderr


def advertised(module: str) -> Collection[str]:
    """Names that a module advertises: those of its `__all__`; all, if it has none and is in that of its package."""
    loaded = importlib.import_module(module)
    package, _, name = module.rpartition(".")
    if hasattr(loaded, "__all__") or not package:
        return getattr(loaded, "__all__", ())
    above = importlib.import_module(package)
    public = name in getattr(above, "__all__", ()) and getattr(above, name) is loaded
    return vars(loaded) if public else ()


def unadvertised(tree: ast.AST, packages: set[str]) -> Iterator[str]:
    """Imports in a file of what `packages` do not advertise."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.split(".")[0] in packages]
            yield from (f"{node.lineno}: {name}" for name in modules if not advertised(name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages:
            public = advertised(node.module)
            missing = [alias.name for alias in node.names if alias.name not in public]
            yield from (f"{node.lineno}: {node.module}.{name}" for name in missing)


def test_siblings_take_what_is_advertised():
    wrong = []
    for path in SOURCES:
        siblings = set(PACKAGES) - {path.relative_to(ROOT / "packages").parts[2]}
        wrong += [f"{path.relative_to(ROOT)}:{place}" for place in unadvertised(tree_of(path), siblings)]
    assert not wrong, "\n".join(wrong)


def test_the_walk_sees_what_is_not_advertised():
    packages = {"cai_mesh", "cai_pipeline"}
    assert list(unadvertised(ast.parse("from cai_pipeline.run.executor import PipelineRunner"), packages))
    assert list(unadvertised(ast.parse("def f():\n    import cai_pipeline.stages.split"), packages))
    assert list(unadvertised(ast.parse("from cai_pipeline import _HOMES"), packages))
    assert not list(
        unadvertised(ast.parse("from cai_pipeline import plans, split\nimport cai_mesh.trial"), packages)
    )
    assert not list(
        unadvertised(
            ast.parse("from cai_pipeline.plans import place\nfrom cai_mesh.errors import PlanError"), packages
        )
    )
