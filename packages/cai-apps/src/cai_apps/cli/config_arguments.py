"""RECIPE|FILE.toml and --section.key value, filling one config."""

from __future__ import annotations

from pathlib import Path

from cai_apps import config_file, recipes
from cai_apps.config import Config
from cai_mesh.errors import ConfigError


def parse(arguments: list[str], *, command: str, description: str) -> tuple[Config, str]:
    """The config, and a label for it: the recipe's or the file's name.

    Raises:
        ConfigError: no recipe is named, or a flag is not a config key.
    """
    import tyro

    recipe = arguments[0] if arguments and not arguments[0].startswith("-") else None
    wants_help = bool({"-h", "--help"} & set(arguments))
    if recipe is None and not wants_help:
        raise ConfigError(
            f"cai {command} needs a recipe or a .toml file",
            expected=f"cai {command} RECIPE|FILE.toml [--section.key value]",
            fix=f"recipes: {', '.join(recipes.names())}",
        )
    check_flags(arguments)
    default = recipes.load(recipe) if recipe else Config()
    config = tyro.cli(
        Config,
        default=default,
        args=arguments[1:] if recipe else arguments,
        prog=f"cai {command} RECIPE|FILE.toml",
        description=description,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
    )
    return config, Path(recipe or "run").stem


def check_flags(arguments: list[str]) -> None:
    """Raises ConfigError for a flag that is not a config key."""
    known = config_file.known_keys()
    for argument in arguments:
        key = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        if argument.startswith("--") and key not in ("help", *known):
            raise config_file.unknown_key(key, known, origin="the command line")
