"""Calls of tools in what a model writes, in the forms of published models.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>                 Hermes, Qwen
[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]                     Mistral
[TOOL_CALLS]name[ARGS]{...}                                               Mistral, later
{"name": ..., "parameters": {...}}, <|python_tag|> before it or not       Llama 3.1; more of them after a semicolon

What is none of these, or names no tool of the request, is text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from cai_apps.engine.text import overlap

HERMES, HERMES_END = "<tool_call>", "</tool_call>"
MISTRAL, LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
MARKS = (HERMES, MISTRAL, LLAMA)
"""Texts that begin a call."""
VISIBLE = (*MARKS, HERMES_END, "[ARGS]")
"""Control tokens that are text to what reads calls."""
NAMED = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})\s*(?:\[ARGS\])?\s*(?=\{)")
"""A call of Mistral's later form, up to its arguments."""
DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Args:
        name: the tool's.
        arguments: JSON text of an object.
        identity: the name of the call, by which its answer is known.
    """

    name: str
    arguments: str
    identity: str


class CallReader:
    """The text of an answer, divided into what people read and calls of tools, while it is written.

    Args:
        names: tools that may be called.
        is_forced: whether the answer is nothing but a call.
    """

    def __init__(self, names: Collection[str], *, is_forced: bool = False):
        self._names, self._is_forced = frozenset(names), is_forced
        self._text, self._has_begun = "", False
        self.calls: list[Call] = []

    def add(self, text: str, *, ends: bool) -> tuple[str, list[Call]]:
        """Add text; return what people may read of it, and the calls that are complete with it.

        Args:
            text: the new text.
            ends: whether nothing follows.
        """
        self._text += text
        before = len(self.calls)
        content = "".join(self._contents(ends=ends))
        self._has_begun |= bool(content.strip())
        return content, self.calls[before:]

    def _contents(self, *, ends: bool) -> list[str]:
        """Take what is certain from the front of the text; return the parts that are no calls."""
        contents = []
        while self._text:
            if not self._has_begun and not contents and self._text.lstrip()[:1] in ("{", ""):
                if not ends:
                    break  # a call of Llama's form, or JSON that is the answer
                if self._read_objects(self._text):
                    self._text = ""
                    break
            place, mark = min(
                ((self._text.find(mark), mark) for mark in MARKS if mark in self._text), default=(-1, "")
            )
            if place < 0:
                keep = 0 if ends else max(overlap(self._text, mark) for mark in MARKS)
                part, rest = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
                if self.calls and not part.strip():  # white space between calls, or after the last
                    self._text = "" if ends else self._text
                    break
                contents.append(part)
                self._text = rest
                break
            before = self._text[:place]
            contents.append(before if before.strip() else "")
            self._text = self._text[place:]
            is_call = self._take_call(mark, ends=ends)
            if is_call is None:
                break
            if not is_call:  # it only looks like one
                contents.append(self._text[: len(mark)])
                self._text = self._text[len(mark) :]
        return contents

    def _take_call(self, mark: str, *, ends: bool) -> bool | None:
        """Take the calls after a mark from the front of the text; False: there are none; None: more text is needed."""
        rest = self._text[len(mark) :]
        if mark == HERMES:
            body, end, after = rest.partition(HERMES_END)
            if not end and not ends:
                return None
            if not self._read_objects(body):
                return False
            self._text = after
            return True
        if not ends:
            return None
        if not self._read_objects(rest):
            return False
        self._text = ""
        return True

    def _read_objects(self, text: str) -> bool:
        """Add the calls that a text is, all or none; return whether it is calls and nothing else."""
        calls: list[Call] = []
        place = 0
        while place < len(text):
            named = NAMED.match(text, place)
            start = named.end() if named else _after_space(text, place)
            if start >= len(text):
                break
            try:
                value, place = DECODER.raw_decode(text, start)
            except (ValueError, RecursionError):
                return False
            entries = value if isinstance(value, list) else [value]
            for entry in entries:
                call = self._call({"name": named[1], "arguments": entry} if named else entry)
                if call is None:
                    return False
                calls.append(call)
            place = _after_space(text, place)
            if text.startswith(MISTRAL, place):
                place += len(MISTRAL)
            elif text[place : place + 1] in (";", ","):
                place += 1
        self.calls += calls
        return bool(calls)

    def _call(self, entry: Any) -> Call | None:
        """Return the call that a value of JSON is; None: it is none."""
        if not isinstance(entry, dict) or entry.get("name") not in self._names:
            return None
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        return Call(entry["name"], text, f"call_{uuid.uuid4().hex[:24]}")


def forced_schema(tools: Collection[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of JSON that calls one of some functions.

    Args:
        tools: functions as OpenAI has them: name, and the schema of their parameters.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["name"]},
                "arguments": tool.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _after_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place
