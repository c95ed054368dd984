"""RECIPE|FILE.toml and --section.key value, filling one config."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NoReturn

from cai_apps import applications, recipes
from cai_apps.cli.flags import changes_of
from cai_apps.config import file as config_file
from cai_apps.config.terminal import terminal
from cai_apps.run.launch.shared_errors import said_by_first_rank
from cai_mesh.errors import ConfigError


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
    if wants_help:
        default = recipes.load(recipe) if recipe else applications.find(applications.DEFAULT).config()
        _show_help(default, command=command, description=description)
    with said_by_first_rank():
        config = read(arguments)
        applications.of(config).check(config)
    return config, Path(arguments[0]).stem


def read(arguments: list[str]) -> Any:
    """The config of a recipe or file, with the values of the flags that follow it, unchecked but for keys and types."""
    default = recipes.load(arguments[0])
    return config_file.change(default, changes_of(arguments[1:], type(default)), origin="the command line")


def given(arguments: list[str]) -> frozenset[str]:
    """Dotted keys of the flags."""
    flags = (argument for argument in arguments if argument.startswith("--"))
    return frozenset(flag.removeprefix("--").partition("=")[0].replace("-", "_") for flag in flags)


def _show_help(default: Any, *, command: str, description: str) -> NoReturn:
    """Prints every key with its type, its value in `default` and its text, and leaves."""
    import tyro

    with contextlib.redirect_stdout(terminal()):  # help has colours
        tyro.cli(
            type(default),
            default=default,
            args=["--help"],
            prog=f"cai {command} RECIPE|FILE.toml",
            description=description,
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
    raise AssertionError("help leaves")
