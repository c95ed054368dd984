"""Recipes of recommendation models, which `cai train` takes as it takes the others."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

from cai_apps import config_file
from cai_apps.recsys.config import RecsysConfig


def _folder():
    return resources.files("cai_apps.recipes") / "recsys"


def names() -> list[str]:
    """Recipe names, sorted."""
    files = _folder().iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def describe(name: str) -> str:
    """The comment on the first line of a recipe."""
    text = (_folder() / f"{name}.toml").read_text(encoding="utf-8")
    return text.splitlines()[0].removeprefix("#").strip()


def takes(recipe: str) -> bool:
    """Whether this is a recipe of a recommendation model, or a TOML file with its tables."""
    if recipe in names():
        return True
    path = Path(recipe).expanduser()
    if path.suffix != ".toml" or not path.is_file():
        return False
    try:
        return "tables" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return False


def load(recipe: str) -> RecsysConfig:
    """The config of a recipe or file that `takes` accepts. Raises `ConfigError` for an unknown key or value."""
    if recipe not in names():
        return config_file.read(Path(recipe).expanduser(), RecsysConfig)
    with resources.as_file(_folder() / f"{recipe}.toml") as path:
        return config_file.read(path, RecsysConfig)
