"""TOML and the config dataclasses: reading with every key and value checked, and writing back."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from cai_apps.config.places import check_regular
from cai_mesh.errors import ConfigError, did_you_mean

T = TypeVar("T")


def read(path: Path, kind: type[T]) -> T:
    """The config of a TOML file, a dataclass of `kind`.

    Raises:
        ConfigError: the file is missing or not TOML, or a key or value is unknown.
    """
    return from_table(kind, parse(path), origin=str(path))


def parse(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, unchecked. Raises `ConfigError` where it is missing or not TOML."""
    check_regular(path, ConfigError)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            f"no config file {path}", fix="`cai recipes` lists the recipes that ship with cai"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML", cause=str(error)) from None


def from_table(
    kind: type[T],
    table: Mapping[str, Any],
    *,
    origin: str,
    path: tuple[str, ...] = (),
    keys: list[str] | None = None,
) -> T:
    """A dataclass of `kind` from a nested mapping; keys the mapping lacks keep their defaults.

    Args:
        origin: where the mapping is from, for messages.
        path, keys: of tables inside others: where it lies, and all keys of the config.
    """
    keys = keys or known_keys(kind)
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in table.items():
        dotted = ".".join((*path, key))
        if key not in hints:
            siblings = [".".join((*path, name)) for name in hints]
            raise unknown_key(dotted, siblings, origin=origin, keys=keys)
        hint = hints[key]
        if (member := _member(hint)) is not None:
            values[key] = {
                name: from_table(member, _table(item, f"{dotted}.{name}", origin), origin=origin,
                                 path=(*path, key, name), keys=keys)
                for name, item in _table(value, dotted, origin).items()
            }  # fmt: skip
        elif dataclasses.is_dataclass(hint):
            inner, rows = typing.cast(type, hint), _table(value, dotted, origin)
            values[key] = from_table(inner, rows, origin=origin, path=(*path, key), keys=keys)
        else:
            values[key] = _checked(value, hint, dotted, origin)
    return kind(**values)


def _member(hint: Any) -> type | None:
    """The dataclass of a `dict[str, dataclass]`; None for anything else."""
    named = typing.get_args(hint) if typing.get_origin(hint) is dict else ()
    return typing.cast(type, named[1]) if named and dataclasses.is_dataclass(named[1]) else None


def _table(value: Any, dotted: str, origin: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_value(dotted, value, "a table", origin)
    return value


def change(config: T, changes: Mapping[str, Any], *, origin: str = "the changes") -> T:
    """The config with other values by dotted key, checked as those of a file are; None takes a value away.

    Raises:
        ConfigError: a key or value is unknown.
    """
    kind, table = type(config), dataclasses.asdict(config)  # type: ignore[call-overload]
    for dotted, value in changes.items():
        if not is_known(dotted, known_keys(kind)):
            raise unknown_key(dotted, known_keys(kind), origin=origin, keys=known_keys(kind))
        *path, leaf = dotted.split(".")
        owner = table
        for name in path:
            owner = owner.setdefault(name, {})
        owner[leaf] = value
    return from_table(kind, _without_none(table), origin=origin)


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }


def known_keys(kind: type, path: tuple[str, ...] = ()) -> list[str]:
    """Every dotted key of a config, e.g. "parallel.tensor.size"; "*" stands for a name that the user gives."""
    keys: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        if (member := _member(hint)) is not None:
            keys += known_keys(member, (*path, name, "*"))
        elif dataclasses.is_dataclass(hint):
            keys += known_keys(typing.cast(type, hint), (*path, name))
        else:
            keys.append(".".join((*path, name)))
    return keys


def hint_of(kind: type, dotted: str) -> Any:
    """The type of the field that a known dotted key names."""
    hint: Any = kind
    for name in dotted.split("."):
        hint = _member(hint) or typing.get_type_hints(hint)[name]
    return hint


def is_known(dotted: str, keys: Iterable[str]) -> bool:
    """Whether a dotted key is one of `known_keys`."""
    given = dotted.split(".")
    return any(
        len(given) == len(parts) and all(part in ("*", name) for part, name in zip(parts, given, strict=True))
        for parts in (key.split(".") for key in keys)
    )


def unknown_key(dotted: str, siblings: list[str], *, origin: str, keys: list[str]) -> ConfigError:
    """The error for a key that does not exist; suggests the same name elsewhere in `keys`, else a close sibling."""
    leaf = dotted.rpartition(".")[2]
    elsewhere = [key for key in keys if key.rpartition(".")[2] == leaf]
    fix = f"did you mean {elsewhere[0]!r}?" if elsewhere else did_you_mean(dotted, siblings)
    return ConfigError(f"unknown config key {dotted!r} in {origin}", fix=fix)


def _checked(value: Any, hint: Any, dotted: str, origin: str) -> Any:
    options = [hint]
    if isinstance(hint, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        hint = next((option for option in options if type(value) is option), options[0])
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if not any(type(choice) is type(value) and choice == value for choice in choices):
            raise ConfigError(
                f"{dotted} has an unknown value in {origin}",
                got=repr(value),
                expected=" or ".join(map(repr, choices)),
                fix=did_you_mean(str(value), map(str, choices)),
            )
        return value
    if typing.get_origin(hint) is tuple:
        of, plural = typing.get_args(hint)[0], {str: "strings", int: "integers"}
        if typing.get_origin(of) is Literal and isinstance(value, list | tuple):
            return tuple(_checked(item, of, dotted, origin) for item in value)
        if not isinstance(value, list | tuple) or not all(type(item) is of for item in value):
            raise _wrong_value(dotted, value, f"a list of {plural.get(of, plural[str])}", origin)
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(
                f"{dotted} is too large in {origin}", got="over 10^308", expected="a number"
            ) from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        names = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false"}
        expected = " or ".join(names[option.__name__] for option in options)
        raise _wrong_value(dotted, value, expected, origin)
    return value


def _wrong_value(dotted: str, value: Any, expected: str, origin: str) -> ConfigError:
    return ConfigError(
        f"{dotted} has a value of the wrong type in {origin}", got=repr(value), expected=expected
    )


def to_toml(config: Any) -> str:
    """TOML text that `read` turns back into an equal config. `None` is left out, as TOML has no null."""
    lines: list[str] = []
    _write_table(config, (), lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(value: Any, path: tuple[str, ...], lines: list[str]) -> None:
    fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    tables = [(f"{name}", item) for name, item in fields if dataclasses.is_dataclass(item)]
    tables += [
        (f"{name}.{key}", each)
        for name, item in fields
        if isinstance(item, dict)
        for key, each in item.items()
    ]
    inner = {name.partition(".")[0] for name, _ in tables} | {
        n for n, item in fields if isinstance(item, dict)
    }
    scalars = [(name, item) for name, item in fields if name not in inner and item is not None]
    if path:
        lines += ["", f"[{'.'.join(path)}]"]
    lines += [f"{name} = {_written(item)}" for name, item in scalars]
    for name, item in tables:
        _write_table(item, (*path, name), lines)


def _written(value: Any) -> str:
    return str(value) if value in (math.inf, -math.inf) else json.dumps(value, ensure_ascii=False)
