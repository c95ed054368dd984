"""Tools that an assistant may call, and its calls, in the one form that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cai_apps.data.chat.values import as_entries, first_of, parse_json, shown
from cai_mesh.errors import DataError

Tool = Mapping[str, Any]


def read_tools(record: Mapping[str, Any]) -> tuple[Tool, ...] | None:
    """Return the tools of a record, each as {"type": "function", "function": {...}}; None: it has none.

    Args:
        record: an object with "tools" (a list, or its JSON text) or OpenAI's older "functions".

    Raises:
        DataError: they are no list of objects with a name.
    """
    tools = next(
        (record[key] for key in ("tools", "functions") if record.get(key) not in (None, "", [])), None
    )
    entries = () if tools is None else as_entries(tools, 'the "tools" of the record')
    return tuple(_tool(entry, number) for number, entry in enumerate(entries, start=1)) or None


def _tool(tool: Any, number: int) -> Tool:
    tool = parse_json(tool, f"tool {number}") if isinstance(tool, str) else tool
    function = _function(tool)
    if function is None:
        raise DataError(
            f"tool {number} has no name",
            got=shown(tool),
            expected='{"type": "function", "function": {"name": "...", "parameters": {...}}}',
        )
    return {"type": "function", "function": dict(function)}


def read_calls(calls: Any, place: str) -> tuple[Tool, ...]:
    """Return calls of tools, their arguments as objects.

    Args:
        calls: one call or a list of them, as OpenAI has them or bare {"name", "arguments"}; None: there are none.
        place: the message, as errors call it.

    Raises:
        DataError: a call has no name, or arguments that are no object.
    """
    if calls is None:
        return ()
    entries = [calls] if isinstance(calls, Mapping) else as_entries(calls, f"what {place} calls")
    return tuple(_call(entry, place) for entry in entries)


def _call(call: Any, place: str) -> Tool:
    function = _function(call)
    if function is None:
        raise DataError(
            f"a call of {place} has no name",
            got=shown(call),
            expected='{"name": "...", "arguments": {...}}, or this as "function" of an object',
        )
    arguments = first_of(function, ("arguments", "parameters"))
    what = f"what {function['name']!r} is called with in {place}"
    arguments = parse_json(arguments, what) if isinstance(arguments, str) and arguments else arguments or {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{what} is no object", got=shown(arguments), expected="an object, or its JSON text")
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {
        **identity,
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def _function(entry: Any) -> Tool | None:
    """Return the object that has the name; None: there is none."""
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    return function if isinstance(function, Mapping) and isinstance(function.get("name"), str) else None
