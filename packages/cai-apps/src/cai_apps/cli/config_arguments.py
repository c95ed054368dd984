"""RECIPE|FILE.toml and --section.key value, filling one config."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from cai_apps import applications, recipes
from cai_apps.config import file as config_file
from cai_mesh.errors import ConfigError

T = TypeVar("T")


def parse(arguments: list[str], *, command: str, description: str) -> tuple[Any, str]:
    """The config of the recipe's application, and a label for it: the recipe's or the file's name.

    Raises:
        CaiError: no recipe is named, a flag is not a config key, or the config is one that cannot run.
    """
    recipe = arguments[0] if arguments and not arguments[0].startswith("-") else None
    wants_help = bool({"-h", "--help"} & set(arguments))
    if recipe is None and not wants_help:
        raise ConfigError(
            f"cai {command} needs a recipe or a .toml file",
            expected=f"cai {command} RECIPE|FILE.toml [--section.key value]",
            fix=f"recipes: {', '.join(recipes.names())}",
        )
    default = recipes.load(recipe) if recipe else applications.find(applications.DEFAULT).config()
    check_flags(arguments, type(default))
    rest = arguments[1:] if recipe else arguments
    config = fill(default, rest, command=command, description=description)
    applications.of(config).check(config)
    return config, Path(recipe or "run").stem


def given(arguments: list[str]) -> frozenset[str]:
    """Dotted keys of the flags."""
    flags = (argument for argument in arguments if argument.startswith("--"))
    return frozenset(flag.removeprefix("--").partition("=")[0].replace("-", "_") for flag in flags)


TRUTH = {"true": "True", "false": "False"}
"""As TOML writes them, to as tyro reads them."""


def fill(default: T, arguments: list[str], *, command: str, description: str) -> T:
    """`default`, a config dataclass, with the values of --section.key flags. Leaves after printing the help."""
    import tyro

    return tyro.cli(
        type(default),
        default=default,
        args=[_spelled(argument) for argument in arguments],
        prog=f"cai {command} RECIPE|FILE.toml",
        description=description,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
    )


def _spelled(argument: str) -> str:
    flag, mark, value = argument.rpartition("=")
    return flag + mark + TRUTH.get(value, value)


def check_flags(arguments: list[str], kind: type) -> None:
    """Raises ConfigError for a flag that is not a key of the config dataclass `kind`."""
    known = config_file.known_keys(kind)
    for argument in arguments:
        key = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        if argument.startswith("--") and key != "help" and not config_file.is_known(key, known):
            raise config_file.unknown_key(key, known, origin="the command line", keys=known)
