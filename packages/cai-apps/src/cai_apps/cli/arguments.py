"""A command's arguments as a dataclass."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import tyro

from cai_apps.config import ranges
from cai_mesh.errors import ConfigError, did_you_mean

T = TypeVar("T")


def parse(kind: type[T], arguments: list[str], *, command: str) -> T:
    """The dataclass `kind` filled from the command line.

    Raises:
        ConfigError: a flag that `kind` does not have, or a number out of its range.
    """
    known = ["help", *(field.name for field in dataclasses.fields(kind))]  # type: ignore[arg-type]
    for argument in arguments:
        flag = argument.removeprefix("--").partition("=")[0]
        if argument.startswith("--") and flag.replace("-", "_") not in known:
            raise ConfigError(f"cai {command} has no option --{flag}", fix=did_you_mean(flag, known))
    options = tyro.cli(kind, args=arguments, prog=f"cai {command}")
    ranges.check(options, flags=True)
    return options
