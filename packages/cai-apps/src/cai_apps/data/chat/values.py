"""Values of a record: read as what they should be, and shown where they are something else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cai_mesh.errors import DataError

LETTERS = 80
"""Letters of a value that an error shows."""


def shown(value: Any) -> str:
    """Return the type and the beginning of a value."""
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"[:LETTERS]


def keys_shown(record: Mapping[str, Any]) -> str:
    """Return the names that an object has values for."""
    return f"the keys {', '.join(map(repr, record))}"[: 4 * LETTERS] if record else "no key"


def first_of(entry: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value under the first of some names that has one; None: none has."""
    return next((entry[name] for name in names if entry.get(name) is not None), None)


def as_text(value: Any, what: str) -> str | None:
    """Return a string, or None where there is nothing.

    Raises:
        DataError: the value is of another type.
    """
    if value is None or isinstance(value, str):
        return value
    raise DataError(f"{what} is of a wrong type", got=shown(value), expected="a string")


def as_entries(value: Any, what: str) -> Sequence[Any]:
    """Return a list; the JSON text of one is read.

    Raises:
        DataError: the value is of another type, or no JSON.
    """
    if isinstance(value, str):
        value = parse_json(value, what)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return value
    raise DataError(f"{what} is no list", got=shown(value), expected="a list of objects")


def parse_json(text: str, what: str) -> Any:
    """Return what a JSON text says.

    Raises:
        DataError: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{what} is no JSON", got=repr(text[:LETTERS]), expected="JSON text", cause=str(error)
        ) from None
