"""Cells of a .csv of conversations or preferences: text, or the JSON of what stands in a record under that key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cai_apps.data.chat.values import LETTERS
from cai_apps.data.records import Record
from cai_mesh.errors import DataError

LISTS = ("messages", "conversations", "conversation", "history", "tools")
"""Keys whose value is a list: their cells are JSON."""
TURNS = ("prompt", "completion", "chosen", "rejected")
"""Keys whose value is a text or a list of messages: a cell that is the JSON of messages is read so."""
SCALARS = ("label", "kto_tag", "margin")
"""Keys whose value is a number or a truth."""


def read_cells(record: Record) -> Record:
    """Return a record of a .csv whose cells have the values that its keys ask for, or why there are none."""
    if not isinstance(record.value, Mapping):
        return record
    try:
        return Record(record.place, {key: _value(key, cell) for key, cell in record.value.items()})
    except DataError as error:
        placed = DataError(
            f"{record.place}: {error.what}",
            got=error.got,
            expected=error.expected,
            cause=error.cause,
            fix=error.fix,
        )
        return Record(record.place, placed)


def _value(key: str, cell: str) -> Any:
    if key in LISTS:
        return _listed(key, cell)
    if key in TURNS and cell.lstrip().startswith("[{"):
        return _turns(cell)
    return _scalar(cell) if key in SCALARS else cell


def _listed(key: str, cell: str) -> Any:
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        is_repr = cell.lstrip().startswith(("[{'", "{'", "[["))
        raise DataError(
            f'the cell of "{key}" is no JSON',
            got=repr(cell[:LETTERS]),
            expected='[{"role": "user", "content": "..."}, ...]',
            cause="it is a list as Python prints it, which nothing reads back" if is_repr else str(error),
            fix="write the list with json.dumps, or the table as .parquet, which keeps lists",
        ) from None


def _turns(cell: str) -> Any:
    """Return messages where a cell is their JSON, else the cell: an answer may be JSON of its own."""
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    are_messages = all(isinstance(entry, dict) and ({"role", "from"} & {*entry}) for entry in value)
    return value if are_messages else cell


def _scalar(cell: str) -> Any:
    """Return the number or truth of a cell, else the cell, which a form may refuse."""
    try:
        return json.loads(cell.strip().lower())
    except ValueError:
        return cell
