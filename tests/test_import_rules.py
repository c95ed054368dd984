"""The dependency direction, held over every import statement of every source file.

An import counts wherever it stands: at the top, inside a function, under TYPE_CHECKING, or as a literal
`import_module("...")`. Between rooms of a package, a string that is nothing but the name of a module counts too.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import house
from tools.source_trees import SOURCES, tree_of

TESTS = Path(__file__).resolve().parent
PACKAGES = TESTS.parent / "packages"
OURS = {path.name.replace("-", "_") for path in PACKAGES.iterdir() if path.is_dir()}
DIMENSIONS = ("cai_tensor_parallel", "cai_pipeline", "cai_zero", "cai_gemini")
ALLOWED = {
    "cai_mesh": {"torch", "numpy", "safetensors"},
    **{name: {"torch", "cai_mesh"} for name in DIMENSIONS},
    "cai_kernels": {"torch", "triton", "cudnn"},
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
            "jinja2",
            "pyarrow",
            "datasets",
            "diffusers",
            "peft",
            "PIL",
            "sklearn",
            "gemmi",
            "llguidance",
            "lm_eval",
            "tensorboard",
            "trackio",
            "wandb",
            "starlette",
            "pydantic",
            "uvicorn",
            "httptools",
            "prometheus_client",
        ),
    },
}
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "cudnn": "nvidia-cudnn-frontend"}
"""How a module is called on the package index, where that is another name."""
LIGHT = {
    "cai_mesh",
    *(
        f"cai_mesh.{name}"
        for name in ("comm", "comm.axes", "comm.handles", "comm.spec", "errors", "protocols")
    ),
    *(f"cai_mesh.layout{name}" for name in ("", ".boxes", ".layout")),
}
FACE = "the package itself"
ROOMS = {
    "cai_mesh": {
        "_lazy": set(),
        "adapters": set(),
        "errors": set(),
        "experts": set(),
        "operators": set(),
        "testing": set(),
        "comm": {"_lazy", "errors"},
        "files": {"errors"},
        "sizes": {"errors"},
        "layout": {"_lazy", "comm", "errors"},
        "protocols": {"comm"},
        "checkpoint": {"comm", "errors", "files", "layout"},
        "rng": {"layout"},
        "attention": {"errors", "protocols"},
        "trial": {"adapters", "attention", "errors"},
        "gradients": {"comm", "errors", "layout", "operators", "protocols"},
        "storage": {"comm", "errors", "gradients", "layout", "protocols"},
    },
    "cai_tensor_parallel": {
        "plans": set(),
        "volume": set(),
        "modes": {"plans"},
        "log_probs": {"modes"},
        "cut": {"modes", "plans"},
        "trial": {"cut", "modes", "plans"},
        "finding": {"cut", "modes", "plans", "trial"},
        "context": {"trial"},
        "experts": {"cut", "finding", "modes", "plans", "trial"},
        "parallelization": {"cut", "experts", "finding", "modes", "plans", "trial"},
    },
    "cai_pipeline": {
        "plans": set(),
        "stages": {"plans"},
        "run": {"plans", "stages"},
    },
    "cai_zero": {
        "reduction": set(),
        "precision": set(),
        "integrations": {FACE},
        "loss_scale": set(),
        "optimizers": set(),
        "state": set(),
        "full_state": {"state"},
        "stage3": {"precision", "reduction"},
        "replicated": {"precision", "reduction", "state"},
        "average": {"replicated"},
        "entry": {"precision", "reduction", "replicated", "stage3"},
        "samples": {"replicated", "stage3"},
    },
    "cai_gemini": {
        "planning": set(),
        "embedding": set(),
        "memory": {"planning"},
        "activations": {"memory"},
        "forward_only": {"memory"},
        "nvme": {"memory"},
        "chunk": {"memory", "nvme", "planning"},
        "checkpointing": {"chunk"},
        "rates": {"chunk", "memory", "nvme", "planning"},
        "steps": {"chunk", "memory", "nvme", "planning"},
        "engine": {"chunk", "memory", "nvme", "planning", "rates", "steps"},
        "optimizer": {"checkpointing", "chunk", "engine", "memory"},
        "factory": {"chunk", "engine", "optimizer", "planning", "steps"},
        "one_device": {"chunk", "engine", "factory", "memory", "optimizer", "planning"},
        "residency": {"chunk", "engine", "factory", "optimizer", "planning"},
    },
    "cai_apps": {
        "config": set(),
        "compose": {"config"},
        "data": {"config"},
        "planner": {"compose", "config"},
        "engine": {"compose", "data"},
        "booster": {"compose", "config"},
        "compat": {"booster", "config"},
        "run": {"compose", "config", "data", "planner"},
        "report": {"config", "run"},
        "applications": {"compose", "config", "data", "engine", "planner", "report", "run"},
        "recipes": {"applications", "config"},
        "serve": {"applications", "config", "data", "engine", "run"},
        "cli": {"applications", "config", "engine", "recipes", "report", "run", "serve"},
    },
    "cai_apps.run": {
        "exit_codes": set(),
        "files": set(),
        "health": {"exit_codes", "files"},
        "task": {"files"},
        "launch": {"exit_codes", "files", "health", "task"},
        "loop": {"files", "task"},
        "probes": set(),
        "trackers": {"files", "health"},
        "worker": {"exit_codes", "files", "health", "launch", "loop", "probes", "task", "trackers"},
        "train": {"files", "health", "launch", "task", "trackers", "worker"},
    },
    "cai_apps.applications.diffusion": {
        "config": set(),
        "model": {"config"},
        "rules": {"config", "model"},
        "sampling": {"config", "model"},
        "commands": {"model", "sampling", FACE},
        "data": {"config", "model", "sampling"},
        "validation": {"config", "model", "rules", "sampling"},
        "training": {"config", "data", "model"},
        "task": {"config", "data", "model", "sampling", "training", "validation"},
    },
}
"""What each room of a folder, or file beside the rooms, may import or name in a string of the others there. Each stands
after those that it may import; in this order a stranger can read them."""
OPTIONAL = {"integrations": {"accelerate", "transformers", "lightning_fabric"}}
"""What files of such a folder may import beside: they are named after it, and nobody imports them for the user."""


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    return ".".join(path.relative_to(PACKAGES).with_suffix("").parts[2:]).removesuffix(".__init__")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for every absolute import in a syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def modules_named(tree: ast.AST) -> set[str]:
    """Every module, and every name of one, that a syntax tree imports; modules that a string names by itself, too."""
    names = {name for _, name in imported(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value.rstrip(".")} if re.fullmatch(r"cai_\w+(\.\w+)+\.?", node.value) else set()
    return names


def offences(package: str, tree: ast.AST, folder: str = "") -> list[tuple[int, str]]:
    """The imports in a syntax tree that a file of `package` may not make."""
    allowed = ALLOWED[package] | {package} | sys.stdlib_module_names | OPTIONAL.get(folder, set())
    return [(line, name) for line, name in imported(tree) if name.split(".")[0] not in allowed]


def test_every_package_has_a_rule():
    assert set(ALLOWED) == OURS
    assert SOURCES


def test_imports_point_one_way():
    wrong = [
        f"{path.relative_to(PACKAGES)}:{line}: {name}"
        for path in SOURCES
        for line, name in offences(module_of(path).split(".")[0], tree_of(path), path.parent.name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(OURS))
def test_what_a_package_may_import_is_what_it_declares(package: str):
    """So that a clean environment of `alone` has all of it, and a shared one hides nothing."""
    project = house.project(package.replace("_", "-"))["project"]
    lists = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    declared = {re.match(r"[A-Za-z0-9_-]+", line).group().lower() for lines in lists for line in lines}
    allowed = {DISTRIBUTIONS.get(name, name) for name in ALLOWED[package]}
    assert {name.replace("_", "-") for name in allowed} == {name.replace("_", "-") for name in declared}


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
    assert offences(package, ast.parse(source))


def test_the_walk_allows_the_permitted_ones():
    source = "import torch.distributed as dist\nfrom cai_mesh.layout import FlatChunk\nfrom . import shards"
    assert not offences("cai_zero", ast.parse(source))


def home_of(folder: str) -> Path:
    """The folder of a dotted name."""
    package, *inside = folder.split(".")
    return PACKAGES.joinpath(package.replace("_", "-"), "src", package, *inside)


def arrows_of(folder: str) -> Iterator[tuple[Path, str, str]]:
    """Yield (file, its room, a room of the same folder that it imports or names)."""
    home, rooms = home_of(folder), ROOMS[folder]
    for path in sorted(home.rglob("*.py")):
        room = path.relative_to(home).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        inside = {name for name in modules_named(tree_of(path)) if f"{name}.".startswith(f"{folder}.")}
        parts = {name.removeprefix(folder).lstrip(".").split(".")[0] for name in inside}
        entered = {part if part in rooms else FACE for part in parts - {""}}
        yield from ((path, room, other) for other in sorted(entered - {room}))


@pytest.mark.parametrize("folder", ROOMS)
def test_every_room_has_a_rule(folder: str):
    home = home_of(folder)
    folders = {path.parent.name for path in home.glob("*/__init__.py")}
    assert set(ROOMS[folder]) == folders | {path.stem for path in home.glob("*.py")} - {
        "__init__",
        "__main__",
    }


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_one_way(folder: str):
    """What the table allows, which has each room after those that it may import."""
    order = list(ROOMS[folder])
    for room, below in ROOMS[folder].items():
        assert not [other for other in below - {FACE} if order.index(other) >= order.index(room)], room
    wrong = [
        f"{path.relative_to(PACKAGES)}: {room} may not name {other}"
        for path, room, other in arrows_of(folder)
        if room in ROOMS[folder] and other not in ROOMS[folder][room]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ROOMS)
def test_every_arrow_between_rooms_is_used(folder: str):
    used = {(room, other) for _, room, other in arrows_of(folder)}
    assert {(room, other) for room, below in ROOMS[folder].items() for other in below} <= used


STANDS_ON = {"alignment": {"language"}}
"""Applications that another is made of (decision 57): what learns from preferences is a language model."""


def test_applications_import_no_other_but_what_they_stand_on():
    home = home_of("cai_apps.applications")
    folders = {folder.name for folder in home.iterdir() if folder.is_dir()}
    wrong = []
    for path in sorted(home.glob("*/**/*.py")):
        application = path.relative_to(home).parts[0]
        names = modules_named(tree_of(path))
        others = {name.split(".")[2] for name in names if name.startswith("cai_apps.applications.")}
        others -= STANDS_ON.get(application, set()) | {application}
        wrong += [f"{path.relative_to(home)}: {other}" for other in others & folders]
    assert not wrong, "\n".join(wrong)


def imports_of_files(package: str) -> dict[str, set[str]]:
    """The modules of a package that each of its files imports, anywhere in it; `__init__` is left out."""
    paths = [path for path in home_of(package).rglob("*.py") if path.name != "__init__.py"]
    named = {module_of(path): modules_named(tree_of(path)) for path in paths}
    return {module: {name for name in names if name in named} - {module} for module, names in named.items()}


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
    cycles = {frozenset(n for n in reach[module] if module in reach[n]) for module in reach}
    return [set(cycle) for cycle in cycles if cycle]


@pytest.mark.parametrize("package", sorted(OURS))
def test_files_import_in_no_circle(package: str):
    assert not circles(imports_of_files(package))


def test_a_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_importing_cai_mesh_stays_light():
    script = "import sys, cai_mesh; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'cai_mesh'))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    public = {name for name in run.stdout.split() if not name.rpartition(".")[2].startswith("_")}
    assert public <= LIGHT, f"import cai_mesh also loaded {sorted(public - LIGHT)}"


def loaded_by(modules: str) -> list[str]:
    """Every module that a fresh process has loaded after importing `modules`."""
    script = f"import sys, {modules}; print(*sorted(sys.modules))"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()


def test_plans_of_pipelines_load_no_torch():
    assert "torch" not in loaded_by("cai_pipeline.plans")


def test_planning_an_offload_needs_no_torch():
    """Nor any other room, for what is pure in it: a plan may be made where nothing trains."""
    loaded = loaded_by("cai_gemini.planning.simulation, cai_gemini.planning.tiers")
    assert "torch" not in loaded
    assert {name.split(".")[1] for name in loaded if name.startswith("cai_gemini.")} == {"planning"}


def test_applications_are_found_without_torch():
    """A config is checked before torch is loaded (decision 39)."""
    loaded = loaded_by("cai_apps.applications as table; [table.find(name) for name in table.TABLE]")
    assert "cai_apps.applications.recsys" in loaded
    assert not {"torch", "transformers"} & {*loaded}


def test_torchs_compiler_is_imported_by_what_compiles_alone():
    """It takes two seconds, which a command that trains nothing need not wait."""
    rooms = "cai_mesh.storage, cai_tensor_parallel.experts, cai_pipeline, cai_zero, cai_gemini, cai_kernels"
    assert "torch._dynamo" not in loaded_by(f"{rooms}, cai_apps.engine")


def has_tests(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in tree.body)


@functools.cache
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
