"""Configs that ship with cai: `cai train llama-tiny`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from cai_apps import applications
from cai_apps.config import file as config_file
from cai_apps.config.places import check_local
from cai_mesh.errors import ConfigError, did_you_mean


def names() -> list[str]:
    """Recipe names, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def describe(name: str) -> str:
    """The comment on the first line of a recipe."""
    text = (resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")
    return text.splitlines()[0].removeprefix("#").strip()


def load(recipe: str, changes: Mapping[str, Any] | None = None) -> Any:
    """The config of a recipe name or of a path to a TOML file, with `changes` by dotted key ("train.steps").

    It is of the application that the file names by `application`.

    Raises:
        ConfigError: neither exists, or a key or value is unknown.
    """
    if recipe in names():
        with resources.as_file(resources.files(__name__) / f"{recipe}.toml") as path:
            return config_file.change(read(path), changes or {})
    check_local("the name of the recipe or file", recipe)
    if recipe.endswith(".toml") or os.sep in recipe:
        return config_file.change(read(Path(recipe).expanduser()), changes or {})
    raise ConfigError(
        f"no recipe {recipe!r}", expected="a recipe or a .toml file", fix=did_you_mean(recipe, names())
    )


def read(path: Path) -> Any:
    """The config of a TOML file, a dataclass of its application.

    Raises:
        ConfigError: the file is missing or not TOML, or a key or value is unknown.
    """
    table = config_file.parse(path)
    kind = applications.find(str(table.get("application", applications.DEFAULT))).config
    return config_file.from_table(kind, table, origin=str(path))
