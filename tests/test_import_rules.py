"""The dependency direction, held over every import statement of every source file.

An import counts wherever it stands: at the top, inside a function, under TYPE_CHECKING, or as a literal
`import_module("...")`.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGES = TESTS.parent / "packages"
OURS = {path.name.replace("-", "_") for path in PACKAGES.iterdir() if path.is_dir()}
DIMENSIONS = ("cai_tensor_parallel", "cai_pipeline", "cai_zero", "cai_gemini")
ALLOWED = {
    "cai_mesh": {"torch", "numpy", "safetensors"},
    **{name: {"torch", "cai_mesh"} for name in DIMENSIONS},
    "cai_kernels": {"torch", "triton"},
    "cai_apps": {
        *(OURS - {"cai_apps"}),
        *(
            "torch",
            "transformers",
            "huggingface_hub",
            "tyro",
            "rich",
            "numpy",
            "matplotlib",
            "safetensors",
            "tokenizers",
            "datasets",
            "diffusers",
            "peft",
            "PIL",
            "sklearn",
            "gemmi",
        ),
    },
}
LIGHT = {
    "cai_mesh",
    *(f"cai_mesh.{name}" for name in ("comm", "comm.axes", "comm.spec", "errors", "protocols")),
    *(f"cai_mesh.layout{name}" for name in ("", ".boxes", ".layout")),
}
ROOMS = {
    "_lazy": set(),
    "errors": set(),
    "experts": set(),
    "operators": set(),
    "protocols": {"comm"},
    "testing": set(),
    "trial": {"errors"},
    "comm": {"errors", "protocols", "_lazy"},
    "layout": {"errors", "comm", "_lazy"},
    "rng": {"layout"},
    "gradients": {"errors", "operators", "protocols", "comm", "layout"},
    "storage": {"errors", "protocols", "comm", "layout", "gradients"},
    "files": {"errors"},
    "sizes": {"errors"},
    "checkpoint": {"errors", "files", "protocols", "comm", "layout"},
}
"""What each room of cai_mesh may import of the others."""
ROOMS_OF_PIPELINE = {"plans": set(), "stages": {"plans"}, "run": {"plans", "stages"}}
"""What each room of cai_pipeline may import of the others."""
ROOMS_OF_TENSOR_PARALLEL = {
    "plans": set(),
    "modes": {"plans"},
    "cut": {"plans", "modes"},
    "trial": {"plans", "modes", "cut"},
    "finding": {"plans", "modes", "cut", "trial"},
    "parallelization": {"plans", "modes", "cut", "trial", "finding"},
    "volume": set(),
}
"""What each room of cai_tensor_parallel may import of the others."""
FACE = "the package itself"
ROOMS_OF_ZERO = {
    "precision": set(),
    "state": set(),
    "full_state": set(),
    "loss_scale": set(),
    "optimizers": set(),
    "reduction": set(),
    "stage3": {"precision", "reduction"},
    "replicated": {"precision", "state", "reduction"},
    "average": {"replicated"},
    "samples": {"stage3", "replicated"},
    "entry": {"precision", "reduction", "stage3", "replicated"},
    "integrations": {FACE},
}
"""What each room, or file beside them, of cai_zero may import of the others."""
ROOMS_OF_APPS = {
    "": {
        "config": set(),
        "data": {"config"},
        "compose": {"config"},
        "planner": {"config", "compose"},
        "run": {"config", "compose", "data", "planner"},
        "report": {"config", "run"},
        "applications": {"config", "compose", "data", "planner", "report", "run"},
        "recipes": {"config", "applications"},
        "cli": {"config", "applications", "recipes", "report", "run"},
    },
    "run": {
        "exit_codes": set(),
        "files": set(),
        "task": {"files"},
        "health": {"exit_codes", "files"},
        "launch": {"exit_codes", "files", "health", "task"},
        "loop": {"files", "task"},
        "worker": {"exit_codes", "files", "health", "launch", "loop", "task"},
        "train": {"files", "health", "launch", "task", "worker"},
    },
    "applications.diffusion": {
        "config": set(),
        "model": {"config"},
        "rules": {"config", "model"},
        "sampling": {"config", "model"},
        "data": {"config", "model", "sampling"},
        "training": {"config", "model", "data"},
        "validation": {"config", "model", "rules", "sampling"},
        "task": {"config", "data", "model", "sampling", "training", "validation"},
        "commands": {"model", "sampling"},
    },
}
"""What each room of a folder of cai_apps may import, or name in a string, of the others there, which stand above it. An
application imports no other application."""
ROOMS_OF_GEMINI = {
    "planning": set(),
    "memory": {"planning"},
    "nvme": {"memory"},
    "chunk": {"planning", "memory", "nvme"},
    "steps": {"planning", "memory", "nvme", "chunk"},
    "rates": {"planning", "memory", "nvme", "chunk"},
    "engine": {"planning", "memory", "nvme", "chunk", "steps", "rates"},
    "activations": {"memory"},
    "embedding": set(),
}
"""What each room of cai_gemini may import of the others. Files at its root, where users begin, import any of them."""
SOURCES = sorted(PACKAGES.glob("*/src/**/*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) for every absolute import in a syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


OPTIONAL = {"integrations": {"accelerate", "transformers", "lightning_fabric"}}
"""What files of such a folder may import beside: they are named after it, and nobody imports them for the user."""


def offences(package: str, source: str, folder: str = "") -> list[tuple[int, str]]:
    """The imports in `source` that a file of `package` may not make."""
    allowed = ALLOWED[package] | {package} | sys.stdlib_module_names | OPTIONAL.get(folder, set())
    return [(line, name) for line, name in imported(ast.parse(source)) if name.split(".")[0] not in allowed]


def test_every_package_has_a_rule():
    assert set(ALLOWED) == OURS
    assert SOURCES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGES)))
def test_imports_point_one_way(path: Path):
    package = path.relative_to(PACKAGES).parts[2]
    wrong = offences(package, path.read_text(), path.parent.name)
    assert not wrong, f"{path.relative_to(PACKAGES)} may not import: {wrong}"


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("cai_zero", "import cai_gemini"),
        ("cai_zero", "def f():\n    from cai_pipeline.plans import Action"),
        ("cai_gemini", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cai_zero.shards"),
        ("cai_pipeline", "import importlib\nimportlib.import_module('cai_tensor_parallel.plans.plan')"),
        ("cai_tensor_parallel", "import transformers"),
        ("cai_kernels", "from cai_mesh import Layout"),
        ("cai_mesh", "import cai_apps"),
        ("cai_mesh", "import transformers.modeling_utils"),
    ],
)
def test_the_walk_sees_forbidden_imports(package: str, source: str):
    assert offences(package, source)


def test_the_walk_allows_the_permitted_ones():
    assert not offences(
        "cai_zero",
        "import torch.distributed as dist\nfrom cai_mesh.layout import FlatChunk\nfrom . import shards",
    )


def rooms_entered(path: Path, package: str) -> set[str]:
    """The rooms of a package that a file of it imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {alias.name for alias in node.names}
    names = (name for _, name in imported(ast.parse(path.read_text())))
    return found | {name.split(".")[1] for name in names if name.startswith(f"{package}.")}


@pytest.mark.parametrize("path", [p for p in SOURCES if "cai_mesh" in p.parts], ids=lambda path: path.name)
def test_rooms_of_cai_mesh_import_one_way(path: Path):
    inside = path.relative_to(next(PACKAGES.glob("cai-mesh/src/cai_mesh"))).parts
    room = inside[0].removesuffix(".py")
    if room != "__init__":
        assert rooms_entered(path, "cai_mesh") - {room} <= ROOMS[room]


def test_rooms_of_cai_tensor_parallel_import_one_way():
    """Rooms and the files beside them, each in the table; the package's own face is for its users."""
    tuple(graphlib.TopologicalSorter(ROOMS_OF_TENSOR_PARALLEL).static_order())  # raises where it has a circle
    home = PACKAGES / "cai-tensor-parallel" / "src" / "cai_tensor_parallel"
    wrong = []
    for path in sorted(home.rglob("*.py")):
        room = path.relative_to(home).parts[0].removesuffix(".py")
        if room != "__init__":
            entered = rooms_entered(path, home.name) - {room} - ROOMS_OF_TENSOR_PARALLEL[room]
            wrong += [f"{path.relative_to(home)}: {name}" for name in sorted(entered)]
    assert not wrong


def test_rooms_of_cai_zero_import_one_way():
    tuple(graphlib.TopologicalSorter(ROOMS_OF_ZERO).static_order())  # raises where the table has a circle
    source = PACKAGES / "cai-zero" / "src" / "cai_zero"
    wrong = []
    for path in (path for path in SOURCES if source in path.parents):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        entered = {name if name in ROOMS_OF_ZERO else FACE for name in rooms_entered(path, "cai_zero")}
        if room != "__init__" and entered - {room} - ROOMS_OF_ZERO[room]:
            wrong.append((str(path.relative_to(source)), entered - {room} - ROOMS_OF_ZERO[room]))
    assert not wrong


APPS = PACKAGES / "cai-apps" / "src" / "cai_apps"


def modules_named(tree: ast.AST) -> set[str]:
    """Every module of cai_apps that a syntax tree imports, or names in a string that holds nothing else."""
    names = {name for _, name in imported(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value.rstrip(".")} if re.fullmatch(r"cai_apps(\.\w+)+\.?", node.value) else set()
    return {name for name in names if name.startswith("cai_apps.")}


def arrows_of(folder: str) -> Iterator[tuple[str, str, str]]:
    """(file, its room, a room that it imports or names) of a folder of cai_apps, without the files at its root that are
    no rooms of its table."""
    home, rooms = APPS.joinpath(*folder.split(".")), ROOMS_OF_APPS[folder]
    prefix = f"cai_apps.{folder}.".replace("..", ".")
    for path in sorted(home.rglob("*.py")):
        room = path.relative_to(home).parts[0].removesuffix(".py")
        names = modules_named(ast.parse(path.read_text())) if room in rooms else set()
        entered = {name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}
        yield from ((str(path.relative_to(APPS)), room, other) for other in entered & set(rooms) - {room})


def test_rooms_of_cai_pipeline_import_one_way():
    source = PACKAGES / "cai-pipeline" / "src" / "cai_pipeline"
    wrong = []
    for path in sorted(source.glob("*/**/*.py")):
        room = path.relative_to(source).parts[0]
        wrong += [
            f"{path.relative_to(source)} imports {name}"
            for name in sorted(rooms_entered(path, "cai_pipeline") - {room} - ROOMS_OF_PIPELINE[room])
        ]
    assert not wrong


def test_every_room_of_cai_apps_has_a_rule():
    for folder, rooms in ROOMS_OF_APPS.items():
        home = APPS.joinpath(*folder.split("."))
        folders = {path.parent.name for path in home.glob("*/__init__.py")}
        files = {path.stem for path in home.glob("*.py")} - {"__init__"} if folder else set()
        assert set(rooms) == folders | files, folder or "cai_apps"


def test_rooms_of_cai_apps_stand_in_one_order():
    """Each room comes after those that it may import."""
    for rooms in ROOMS_OF_APPS.values():
        order = list(rooms)
        assert not [
            (room, other)
            for room, below in rooms.items()
            for other in below
            if order.index(other) > order.index(room)
        ]


def test_rooms_of_cai_apps_import_one_way():
    wrong = [
        f"{path}: {room} may not name {other}"
        for folder, rooms in ROOMS_OF_APPS.items()
        for path, room, other in arrows_of(folder)
        if other not in rooms[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_every_arrow_of_the_rooms_of_cai_apps_is_used():
    for folder, rooms in ROOMS_OF_APPS.items():
        used = {(room, other) for _, room, other in arrows_of(folder)}
        assert used == {(room, other) for room, below in rooms.items() for other in below}, folder


def test_applications_import_no_other():
    home, wrong = APPS / "applications", []
    for path in sorted(home.glob("*/**/*.py")):
        application = path.relative_to(home).parts[0]
        names = modules_named(ast.parse(path.read_text()))
        others = {name.split(".")[2] for name in names if name.startswith("cai_apps.applications.")}
        folders = {folder.name for folder in home.iterdir() if folder.is_dir()}
        wrong += [f"{path.relative_to(APPS)}: {other}" for other in others & folders - {application}]
    assert not wrong, "\n".join(wrong)


def imports_of_files(package: Path) -> dict[str, set[str]]:
    """The modules of a package that each of its files imports, anywhere in it; `__init__` is left out."""
    paths = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    trees = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): ast.parse(path.read_text())
        for path in paths
    }
    found = {}
    for module, tree in trees.items():
        names = {name for _, name in imported(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        found[module] = {name for name in names if name in trees and name != module}
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of more than one file whose imports lead from each to each."""
    reach = {module: set(names) for module, names in graph.items()}
    changed = True
    while changed:
        changed = False
        for names in reach.values():
            more = set().union(*(reach[name] for name in names)) - names
            names |= more
            changed = changed or bool(more)
    found = {frozenset(n for n in reach[module] if module in reach[n]) for module in reach}
    return [set(circle) for circle in found if circle]


def test_files_of_cai_apps_import_in_no_circle():
    assert not circles(imports_of_files(APPS))


def test_a_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_rooms_of_cai_gemini_import_one_way():
    gemini = PACKAGES / "cai-gemini" / "src" / "cai_gemini"
    wrong = []
    for path in gemini.glob("*/**/*.py"):
        room = path.relative_to(gemini).parts[0]
        others = rooms_entered(path, "cai_gemini") - {room} - ROOMS_OF_GEMINI[room]
        wrong += [f"{path.relative_to(gemini)}: {other}" for other in sorted(others)]
    assert not wrong


@pytest.mark.parametrize("room", ["comm", "layout", "gradients", "storage", "checkpoint", "trial", "files"])
def test_rooms_advertise_what_they_have(room: str):
    module = importlib.import_module(f"cai_mesh.{room}")
    for name in module.__all__:
        getattr(module, name)


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if "cai_mesh" not in p.parts],
    ids=lambda path: str(path.relative_to(PACKAGES)),
)
def test_siblings_use_what_cai_mesh_advertises(path: Path):
    wrong = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cai_mesh":
            advertised = getattr(importlib.import_module(node.module), "__all__", None)
            wrong += [
                alias.name for alias in node.names if advertised is not None and alias.name not in advertised
            ]
            if advertised is None and node.module.count(".") > 1:
                wrong.append(node.module)
    assert not wrong


def test_cai_apps_uses_what_cai_tensor_parallel_advertises():
    wrong = []
    for path in sorted(APPS.rglob("*.py")):
        tree = ast.parse(path.read_text())
        wrong += [
            name for _, name in imported(tree) if name.count(".") > 1 and name.startswith("cai_tensor_")
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cai_tensor_parallel"):
                advertised = getattr(importlib.import_module(node.module), "__all__", ())
                wrong += [
                    f"{node.module}.{alias.name}" for alias in node.names if alias.name not in advertised
                ]
    assert not wrong


def test_planning_an_offload_needs_no_torch():
    """Nor any other room, for what is pure in it: a plan may be made where nothing trains."""
    script = (
        "import sys, cai_gemini.planning.simulation, cai_gemini.planning.tiers; print(*sorted(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "torch" not in loaded
    assert {name.split(".")[1] for name in loaded if name.startswith("cai_gemini.")} == {"planning"}


def test_importing_cai_mesh_stays_light():
    script = "import sys, cai_mesh; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'cai_mesh'))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    public = {name for name in run.stdout.split() if not name.rpartition(".")[2].startswith("_")}
    assert public <= LIGHT, f"import cai_mesh also loaded {sorted(public - LIGHT)}"


def test_plans_of_pipelines_load_no_torch():
    script = "import sys, cai_pipeline.plans; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def has_tests(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in tree.body)


def modules_of_tests() -> dict[Path, ast.Module]:
    """Every module of every folder of tests; those with tests, and those that tests share."""
    files = [*TESTS.rglob("*.py"), *PACKAGES.glob("*/tests/**/*.py")]
    return {path: ast.parse(path.read_text()) for path in files}


def test_no_module_with_tests_is_imported():
    """What tests share stands in a module without tests beside them."""
    trees = modules_of_tests()
    with_tests = {path.stem for path, tree in trees.items() if has_tests(tree)}
    wrong = [
        f"{path.relative_to(TESTS.parent)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in imported(tree)
        if with_tests & set(name.split("."))
    ]
    assert not wrong


def test_what_tests_share_has_a_name_of_its_own():
    """One process may run the tests of all packages, and imports each of these by its name alone."""
    trees = modules_of_tests()
    modules = [path.stem for path, tree in trees.items() if path.stem != "conftest" and not has_tests(tree)]
    asked_for = {name for tree in trees.values() for _, name in imported(tree)}
    assert not [name for name in asked_for if modules.count(name) > 1]
