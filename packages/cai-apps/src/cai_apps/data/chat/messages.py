"""Conversations, and the forms in which files have them.

{"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}                OpenAI, transformers
{"messages": [{"from": "human", "content": "..."}, ...]}                               ColossalChat
{"conversations": [{"from": "human", "value": "..."}, ...], "system": "...", "tools": "[...]"}     ShareGPT
{"prompt": "...", "completion": "..."}                      strings, or lists of messages as trl has them
{"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [["...", "..."]]}   Alpaca
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cai_apps.data.chat.tools import Tool, read_calls, read_tools
from cai_apps.data.chat.values import LETTERS, as_entries, as_text, first_of, keys_shown, parse_json, shown
from cai_mesh.errors import DataError, did_you_mean

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = (SYSTEM, USER, ASSISTANT, TOOL)
CALL = "function_call"
ALIASES = {
    **dict.fromkeys(("system", "developer"), SYSTEM),
    **dict.fromkeys(("user", "human", "prompter"), USER),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "ai"), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response", "ipython"), TOOL),
    **dict.fromkeys(("function_call", "tool_call"), CALL),
}  # fmt: skip
"""What roles are called, to what they are here; a call is an assistant's message whose content is JSON."""
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Args:
        role: one of `ROLES`.
        content: the text; empty where an assistant only calls tools.
        tool_calls: the calls, as transformers has them, their arguments as objects.
        reasoning: an assistant's thoughts before the answer, where they stand apart from it.
        name: the name of the tool that answers.
        tool_call_id: the call that a tool answers.
        trained: whether the message may be trained on, if its role is.
    """

    role: str
    content: str
    tool_calls: tuple[Tool, ...] = ()
    reasoning: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    trained: bool = True


@dataclass(frozen=True)
class Conversation:
    """Messages in their order, and the tools that the assistant may call; None: none are said."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None = None


def read_conversation(record: Mapping[str, Any]) -> Conversation:
    """Return the conversation that a record is, in whichever form.

    Raises:
        DataError: the record has no form that is known, or a value that its form does not have.
    """
    form = form_of(record)
    if form is None:
        raise _unknown_form(record)
    messages = with_system(record, FORMS[form](record))
    if not messages:
        raise DataError("the conversation has no message", got=f'"{form[0]}": []', expected="at least one")
    return Conversation(tuple(messages), read_tools(record))


def form_of(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the keys of the form that a record has; None: it has none."""
    return next((keys for keys in FORMS if all(record.get(key) is not None for key in keys)), None)


def _unknown_form(record: Mapping[str, Any]) -> DataError:
    """Return the error of a record that has not all keys of a form."""
    for keys in FORMS:
        present = [key for key in keys if record.get(key) is not None]
        if present and len(present) < len(keys):
            (absent,) = set(keys) - set(present)
            return DataError(
                f'the record has "{present[0]}" and no "{absent}"',
                got=keys_shown(record),
                expected=" and ".join(map(repr, keys)),
                fix=did_you_mean(absent, {*record} - {*present} or {absent}),
            )
    return DataError(
        "the record is no conversation of a form that is known",
        got=keys_shown(record),
        expected=" or ".join(" and ".join(map(repr, keys)) for keys in FORMS),
        fix=_closest_key(record),
    )


QUESTIONS = ("question", "query", "input", "user", "human", "instruction", "prompt")
ANSWERS = ("answer", "response", "output", "assistant", "gpt", "completion", "chosen")
"""Keys of records with one question and its answer, in files of no form that is known."""


def _closest_key(record: Mapping[str, Any]) -> str:
    """Return advice on the keys of a record: one turn by other names, or a key that is nearly one of a form's."""
    question, answer = (next((key for key in keys if key in record), None) for keys in (QUESTIONS, ANSWERS))
    if question and answer:
        return f"rename {question!r} to 'prompt' and {answer!r} to 'completion'"
    names = {name for keys in FORMS for name in keys}
    advice = (did_you_mean(str(key), names) for key in record)
    return next(
        (text for text in advice if text.startswith("did you mean")), "rename the keys, or convert the file"
    )


def read_messages(record: Mapping[str, Any], key: str) -> list[Message]:
    """Return the messages of a list under a key; calls that follow one another are one message.

    Raises:
        DataError: there is no list, or one of its entries is no message.
    """
    messages: list[Message] = []
    joins = False
    for number, entry in enumerate(as_entries(record[key], f'"{key}"'), start=1):
        message, is_call = read_message(entry, f"message {number}")
        if joins and is_call:
            previous = messages.pop()
            message = replace(previous, tool_calls=(*previous.tool_calls, *message.tool_calls))
        messages.append(message)
        joins = is_call
    return messages


def read_message(entry: Any, place: str) -> tuple[Message, bool]:
    """Return a message, and whether its role says that it is nothing but a call.

    Args:
        entry: an object with a role and its text.
        place: the name by which an error calls it.

    Raises:
        DataError: the entry is no message.
    """
    if not isinstance(entry, Mapping):
        raise DataError(
            f"{place} is no object", got=shown(entry), expected='{"role": "...", "content": "..."}'
        )
    name = first_of(entry, ("role", "from"))
    if not isinstance(name, str):
        raise DataError(
            f"{place} has no role",
            got=keys_shown(entry) if name is None else f"{type(name).__name__} {name!r}"[:LETTERS],
            expected='a string "role" or "from"',
        )
    role = ALIASES.get(name.strip().lower())
    if role is None:
        raise DataError(
            f"{place} has an unknown role",
            got=repr(name[:LETTERS]),
            expected=", ".join(ROLES),
            fix=did_you_mean(name.strip().lower(), ALIASES),
        )
    content = _text(first_of(entry, ("content", "value")), place)
    if role == CALL:
        calls = read_calls(parse_json(content or "", place), place)
        message = Message(ASSISTANT, "", calls, trained=_weight(entry, place))
        return message, True
    calls = ()
    if role == ASSISTANT:
        calls = read_calls(first_of(entry, ("tool_calls", "function_call")), place)
    message = Message(
        role,
        content or "",
        calls,
        as_text(first_of(entry, REASONING), f"the reasoning of {place}"),
        as_text(entry.get("name"), f"the name of {place}"),
        as_text(entry.get("tool_call_id"), f"the tool_call_id of {place}"),
        _weight(entry, place),
    )
    _check_content(message, content, entry, place)
    return message, False


def _check_content(message: Message, content: str | None, entry: Mapping[str, Any], place: str) -> None:
    """Raise DataError for a message that says nothing."""
    if message.role == ASSISTANT:
        if not (message.content.strip() or message.tool_calls):
            raise DataError(
                f"the answer is empty: {place} of the assistant",
                got=shown(content),
                expected="text, or tool_calls",
                fix="leave out the conversation, or say what the model shall answer",
            )
    elif content is None:
        raise DataError(
            f"{place} has no content",
            got=keys_shown(entry),
            expected='a string "content" or "value"',
            fix="an empty message is written as an empty string",
        )


def _text(content: Any, place: str) -> str | None:
    """Return a message's text; parts of text are joined."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "".join(_part(part, place) for part in content)
    raise DataError(
        f"the content of {place} is of a wrong type",
        got=shown(content),
        expected='a string, or a list of {"type": "text", "text": "..."}',
        fix="write an object as JSON text",
    )


def _part(part: Any, place: str) -> str:
    is_text = isinstance(part, Mapping) and part.get("type", "text") in ("text", "input_text", "output_text")
    text = part.get("text") if is_text else part
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise DataError(
        f"the content of {place} has a part that is no text",
        got=repr(kind)[:LETTERS],
        expected='{"type": "text", "text": "..."}',
        cause="what is trained here are language models, of text alone",
    )


def _weight(entry: Mapping[str, Any], place: str) -> bool:
    """Return whether OpenAI's "weight" of a message lets it be trained on."""
    weight = entry.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(
            f"{place} has an unknown weight", got=shown(weight), expected="0 (not trained on) or 1"
        )
    return weight != 0


def _prompt(record: Mapping[str, Any]) -> list[Message]:
    """Return a prompt that is not trained on, and its completion."""
    messages: list[Message] = []
    for key, role in (("prompt", USER), ("completion", ASSISTANT)):
        value = record[key]
        if isinstance(value, str):
            entries = [read_message({"role": role, "content": value}, f'"{key}"')[0]]
        else:
            entries = read_messages(record, key)
        is_completion = key == "completion"
        messages += [replace(entry, trained=entry.trained and is_completion) for entry in entries]
    return messages


def _alpaca(record: Mapping[str, Any]) -> list[Message]:
    answer = as_text(record["output"], '"output"')
    return [*alpaca_prompt(record), read_message({"role": ASSISTANT, "content": answer}, '"output"')[0]]


def alpaca_prompt(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages of "history", and "instruction" with "input" as the question after them.

    Raises:
        DataError: they are no text, or the history is no list of questions with their answers.
    """
    messages = []
    for number, pair in enumerate(record.get("history") or (), start=1):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise DataError(
                f'entry {number} of "history" is no question with its answer',
                got=shown(pair),
                expected="two strings",
            )
        for role, text in zip((USER, ASSISTANT), pair, strict=True):
            messages.append(read_message({"role": role, "content": text}, f'entry {number} of "history"')[0])
    parts = [as_text(record.get(key), f'"{key}"') for key in ("instruction", "input")]
    question = "\n".join(part for part in parts if part)
    messages.append(read_message({"role": USER, "content": question}, '"instruction"')[0])
    return messages


def with_system(record: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Return messages after the system's, which some forms have beside them.

    Raises:
        DataError: the messages begin with another one of the system.
    """
    text = as_text(first_of(record, ("system", "system_prompt")), 'the "system" of the record')
    if not text:
        return messages
    if messages and messages[0].role == SYSTEM:
        if messages[0].content == text:
            return messages
        raise DataError(
            "the record has two system messages",
            got=f"{text[:LETTERS]!r} beside the messages, {messages[0].content[:LETTERS]!r} among them",
            expected="one",
        )
    return [Message(SYSTEM, text), *messages]


FORMS: dict[tuple[str, ...], Callable[[Mapping[str, Any]], list[Message]]] = {
    ("messages",): lambda record: read_messages(record, "messages"),
    ("conversations",): lambda record: read_messages(record, "conversations"),
    ("conversation",): lambda record: read_messages(record, "conversation"),
    ("prompt", "completion"): _prompt,
    ("instruction", "output"): _alpaca,
}
"""The keys by which a form is known, in the order in which they are looked for, and what reads its messages."""
