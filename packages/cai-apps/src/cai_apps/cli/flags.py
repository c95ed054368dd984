"""--section.key value: flags of the command line as changes of a config, read by the types of its fields."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from cai_apps.config import file as config_file
from cai_mesh.errors import ConfigError

TRUTH = {"true": True, "false": False}


def changes_of(arguments: Sequence[str], kind: type) -> dict[str, Any]:
    """Values by dotted key. What cannot be read as its field's type is left as text: the config's checks refuse it.

    Of a flag that is given twice the last counts, as scripts add to a command. A flag of what is true or false means
    true where it has no value.

    Raises:
        ConfigError: what is no flag, no key of `kind`, or has no value.
    """
    valid_keys, values_by_key = config_file.known_keys(kind), {}
    for key, texts in _flags(arguments):
        if not config_file.is_known(key, valid_keys):
            raise config_file.unknown_key(key, valid_keys, origin="the command line", keys=valid_keys)
        hint = config_file.hint_of(kind, key)
        several = typing.get_origin(hint) is tuple
        if not texts and hint is bool:
            texts = ["true"]
        if not several and len(texts) != 1:
            raise ConfigError(
                f"--{key} has {'no' if not texts else 'more than one'} value",
                got=" ".join(texts) or "nothing",
                expected=f"--{key} VALUE",
            )
        item = typing.get_args(hint)[0] if several else hint
        values = [value_of(text, item) for text in texts]
        values_by_key[key] = values if several else values[0]
    return values_by_key


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Keys, and what is given for each up to the next."""
    at = 0
    while at < len(arguments):
        flag, mark, value = arguments[at].partition("=")
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(
                f"{arguments[at]!r} is no flag",
                expected="--section.key VALUE, after one recipe or .toml file",
            )
        at += 1
        values = [value] if mark else []
        while not mark and at < len(arguments) and not arguments[at].startswith("--"):
            values.append(arguments[at])
            at += 1
        yield flag.removeprefix("--").replace("-", "_"), values


def value_of(text: str, hint: Any) -> Any:
    """Text as a value of a field's type; text that is none stays as it is."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and text.lower() == "none":
        return None
    for option in options:
        if typing.get_origin(option) is Literal:
            return next((choice for choice in typing.get_args(option) if str(choice) == text), text)
        if option is bool and text.lower() in TRUTH:
            return TRUTH[text.lower()]
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
    return text
