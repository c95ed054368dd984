"""A command's arguments as a dataclass."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import tyro

from cai_apps.config import ranges
from cai_apps.config.terminal import terminal
from cai_mesh.errors import ConfigError, did_you_mean

T = TypeVar("T")
SHOWN = 400
"""Letters of a message that are shown."""


def parse(kind: type[T], arguments: list[str], *, command: str) -> T:
    """The dataclass `kind` filled from the command line; "~" of paths is the home directory.

    Raises:
        ConfigError: a flag that `kind` does not have, one argument too many, a number out of its range, an empty path.
    """
    known = ["help", *(field.name for field in dataclasses.fields(kind))]  # type: ignore[arg-type]
    for argument in arguments:
        flag = argument.removeprefix("--").partition("=")[0]
        if argument.startswith("--") and flag.replace("-", "_") not in known:
            raise ConfigError(f"cai {command} has no option --{flag}", fix=did_you_mean(flag, known))
    with _errors_told(command):
        options, more = tyro.cli(kind, args=arguments, prog=f"cai {command}", return_unknown_args=True)
    if more:
        raise ConfigError(
            f"cai {command} has more arguments than it takes",
            got=", ".join(more)[:SHOWN],
            fix=f"`cai {command} --help` shows them",
        )
    ranges.check(options, flags=True)
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    paths = {name: value.expanduser() for name, value in values.items() if isinstance(value, Path)}
    lists = {name: value for name, value in values.items() if _are_paths(value)}
    _check_filled(paths | {name: path for name, several in lists.items() for path in several}, arguments)
    expanded = {name: tuple(path.expanduser() for path in several) for name, several in lists.items()}
    return dataclasses.replace(options, **paths, **expanded)  # type: ignore[type-var]


def _are_paths(value: object) -> bool:
    return isinstance(value, tuple) and any(isinstance(part, Path) for part in value)


def _check_filled(paths: dict[str, Path], arguments: list[str]) -> None:
    """Raise ConfigError for a path that was given as nothing, which would be the directory one is in."""
    values = (each.partition("=")[2] if each.startswith("--") else each for each in arguments)
    if any(value and Path(value) == Path() for value in values):
        return
    for name, path in paths.items():
        if path == Path():
            raise ConfigError(
                f"the path of {name} is empty",
                got="''",
                cause="often a variable of the shell that is not set",
                fix="give a path; . is the directory you are in",
            )


@contextlib.contextmanager
def _errors_told(command: str) -> Iterator[None]:
    """Raises what tyro prints of arguments that it cannot read as a ConfigError."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(terminal()):  # help has colours
            yield
    except SystemExit as left:
        if left.code in (0, None):
            raise
        lines = [line.strip(" │╭╮╰╯─━") for line in printed.getvalue().splitlines()]
        told = [
            line
            for line in lines
            if line.strip("-") and not line.startswith(("Parsing error", "For full helptext"))
        ]
        raise ConfigError(
            f"cai {command} cannot read its arguments",
            got="; ".join(told)[:SHOWN],
            fix=f"`cai {command} --help` shows them",
        ) from None
