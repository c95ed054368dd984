"""Pairs of answers of which one is preferred, answers judged one by one, and the forms in which files have them.

{"prompt": "..." or messages, "chosen": "..." or messages, "rejected": ...}                     trl, OpenAI, xtuner
{"prompt": "...", "chosen": [user, assistant], "rejected": [user, assistant]}      UltraFeedback, both with the prompt
{"chosen": messages, "rejected": messages}                 trl: the prompt is what both begin with
{"chosen": "\\n\\nHuman: ...\\n\\nAssistant: ...", "rejected": "..."}                              Anthropic's HH
{"context": [{"from": "human", "content": "..."}], "chosen": [...], "rejected": [...]}             ColossalChat
{"conversations": [...], "chosen": {"from": "gpt", "value": "..."}, "rejected": {...}}             LLaMA-Factory
{"instruction": "...", "input": "...", "chosen": "...", "rejected": "..."}                         Alpaca
{"system": "...", "question": "...", "chosen": "...", "rejected": "..."}                           Intel's Orca
{"prompt": "..." or messages, "completion": "..." or messages, "label": true}                      trl, for KTO
{"messages": [..., the answer], "label": true}, {"conversations": [...], "kto_tag": true}          LLaMA-Factory
{"instruction": "...", "input": "...", "output": "...", "kto_tag": true}                           Alpaca
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from cai_apps.data.chat.messages import (
    ASSISTANT,
    SYSTEM,
    USER,
    Message,
    alpaca_prompt,
    read_message,
    read_messages,
    with_system,
)
from cai_apps.data.chat.prepare import placed
from cai_apps.data.chat.tools import Tool, read_tools
from cai_apps.data.chat.values import LETTERS, keys_shown, shown
from cai_apps.data.preference.dialogue import is_dialogue, parse_dialogue
from cai_mesh.errors import DataError, did_you_mean

Kind = Literal["pairs", "judged"]
Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt.

    Args:
        prompt: the messages that both answers follow, none of them trained on; the last is no assistant's.
        chosen: the messages of the preferred answer, an assistant's first.
        rejected: the messages of the other one, as of `chosen`.
        tools: the tools that the assistant may call; None: none are said.
        margin: the amount by which `chosen` is better; None: it is not said.
    """

    prompt: Messages
    chosen: Messages
    rejected: Messages
    tools: tuple[Tool, ...] | None
    margin: float | None


@dataclass(frozen=True)
class Judged:
    """One answer to a prompt, and a judgement of it.

    Args:
        prompt: the messages before the answer, none of them trained on; the last is no assistant's.
        completion: the messages of the answer, an assistant's first.
        tools: the tools that the assistant may call; None: none are said.
        desirable: whether the answer is one that is wished for.
    """

    prompt: Messages
    completion: Messages
    tools: tuple[Tool, ...] | None
    desirable: bool


def read_preference(record: Mapping[str, Any]) -> Pair | Judged:
    """Return the pair or the judged answer that a record is, in whichever form.

    Raises:
        DataError: the record has no form that is known, a value that its form does not have, answers that are the
            same, or prompts that differ.
    """
    form = form_of(record)
    if form is None:
        raise _unknown_form(record)
    return FORMS[form](record, form)


def form_of(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the keys of the form that a record has; None: it has none."""
    return next((keys for keys in FORMS if all(record.get(key) is not None for key in keys)), None)


def kind_of(record: Mapping[str, Any]) -> Kind | None:
    """Return what a record is, by its keys and the kind of its label; None: no preference.

    A conversation may have a label of another kind, which judges nothing.
    """
    form = form_of(record)
    if form is None:
        return None
    if form[-1] == "rejected":
        return "pairs"
    return "judged" if record[form[-1]] in (True, False) else None


def _unknown_form(record: Mapping[str, Any]) -> DataError:
    """Return the error of a record that has not all keys of a form."""

    def missing(keys: tuple[str, ...]) -> list[str]:
        return [key for key in keys if record.get(key) is None]

    if {"messages", "conversations"} & set(record) and not {"chosen", "rejected", "label"} & set(record):
        return DataError(
            "the record is a conversation without a judgement of its answer",
            got=keys_shown(record),
            expected='"chosen" and "rejected", or for kto "label"',
            fix='add "label", or train on conversations with a recipe such as sft-8b or sft-tiny',
        )
    nearest = min(FORMS, key=lambda keys: (len(missing(keys)), -len(keys)))
    absent = missing(nearest)
    if len(absent) == 1 and len(nearest) > 1:
        present = " and ".join(f'"{key}"' for key in nearest if key not in absent)
        remaining = {str(key) for key in record} - {*nearest}
        return DataError(
            f'the record has {present} and no "{absent[0]}"',
            got=keys_shown(record),
            expected=" and ".join(map(repr, nearest)),
            fix=_renamed(absent[0], remaining),
        )
    names = {key for keys in FORMS for key in keys}
    advice = (did_you_mean(str(key), names) for key in record if key not in names)
    return DataError(
        "the record is no preference of a form that is known",
        got=keys_shown(record),
        expected=" or ".join(" and ".join(map(repr, keys)) for keys in FORMS),
        fix=next((text for text in advice if text.startswith("did you mean")), "rename the keys"),
    )


def _renamed(absent: str, remaining: set[str]) -> str:
    """Return advice on a key that is absent, of the record's other keys."""
    advice = did_you_mean(absent, remaining or {absent})
    close = advice.startswith("did you mean") and bool(remaining)
    return f"{advice} It is to be called {absent!r}" if close else f"add {absent!r}, or leave out the record"


def _answer(record: Mapping[str, Any], key: str) -> Messages:
    """Return the messages under a key: a string or an object is one, of the assistant."""
    value = record[key]
    if isinstance(value, str):
        return (read_message({"role": ASSISTANT, "content": value}, f'"{key}"')[0],)
    entries = {key: [value]} if isinstance(value, Mapping) else record
    with placed(f'"{key}"'):
        return tuple(read_messages(entries, key))


def _question(record: Mapping[str, Any], key: str) -> list[Message]:
    """Return the messages of a prompt: a string is one, of the user."""
    value = record[key]
    if isinstance(value, str):
        return [read_message({"role": USER, "content": value}, f'"{key}"')[0]]
    return read_messages(record, key)


def _pair(record: Mapping[str, Any], prompt: list[Message], chosen: Messages, rejected: Messages) -> Pair:
    """Return a pair that is checked; the system's message may stand beside the prompt."""
    messages = _checked_prompt(with_system(record, prompt))
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        _check_answer(answer, f'"{key}"')
    if chosen == rejected:
        raise DataError(
            '"chosen" equals "rejected"',
            got=repr(chosen[-1].content)[:LETTERS],
            expected="two answers that differ",
            fix="leave out the record",
        )
    return Pair(messages, chosen, rejected, read_tools(record), _margin(record))


def _checked_prompt(messages: list[Message]) -> Messages:
    """Return a prompt that is not trained on, and that an answer may follow."""
    if not any(message.role != SYSTEM for message in messages):
        raise DataError("the prompt is empty", expected="at least one message that is not the system's")
    if messages[-1].role == ASSISTANT:
        raise DataError(
            "the prompt ends with an answer",
            got=shown(messages[-1].content),
            expected="a message of the user or of a tool last",
            cause="an answer would follow another, and no template joins them",
        )
    return tuple(replace(message, trained=False) for message in messages)


def _check_answer(answer: Messages, place: str) -> None:
    if not answer or answer[0].role != ASSISTANT:
        raise DataError(
            f"the answer {place} does not begin with an assistant's message",
            got=f"the role {answer[0].role!r}" if answer else "no message",
            expected="the role 'assistant'",
        )


def _margin(record: Mapping[str, Any]) -> float | None:
    margin = record.get("margin")
    if margin is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError('"margin" is no finite number', got=shown(margin), expected="a number, such as 0.5")
    return float(margin)


def _read_pair(record: Mapping[str, Any], form: tuple[str, ...]) -> Pair:
    """Return a pair whose prompt stands under the first key, and again before both answers if they are whole."""
    prompt = alpaca_prompt(record) if form[0] == "instruction" else _question(record, form[0])
    chosen, rejected = _answer(record, "chosen"), _answer(record, "rejected")
    if not any(answer and answer[0].role in (SYSTEM, USER) for answer in (chosen, rejected)):
        return _pair(record, prompt, chosen, rejected)
    beginning, *answers = _divide(chosen, rejected)
    first = (prompt[0].role if prompt else USER, beginning[0].role)
    begun = [prompt[0], *beginning] if first[0] == SYSTEM != first[1] else beginning
    expected = [beginning[0], *prompt] if first[1] == SYSTEM != first[0] else prompt
    if begun[: len(expected)] != expected:
        raise DataError(
            f'"chosen" and "rejected" begin with another prompt than "{form[0]}"',
            got=repr([message.content for message in begun])[:LETTERS],
            expected=repr([message.content for message in expected])[:LETTERS],
            fix="leave the prompt out of the answers, or correct it",
        )
    return _pair(record, begun, *answers)


def _read_implicit(record: Mapping[str, Any], form: tuple[str, ...]) -> Pair:
    """Return a pair whose prompt is what both conversations begin with."""
    chosen, rejected = (_conversation(record, key) for key in form)
    return _pair(record, *_divide(chosen, rejected))


def _conversation(record: Mapping[str, Any], key: str) -> Messages:
    value = record[key]
    if not isinstance(value, str):
        return _answer(record, key)
    if is_dialogue(value):
        return parse_dialogue(value, f'"{key}"')
    raise DataError(
        f'"{key}" is a string that does not say where its prompt ends',
        got=repr(value)[:LETTERS],
        expected='messages, or "\\n\\nHuman: ...\\n\\nAssistant: ..." as in HH',
        fix='add the prompt as "prompt"',
    )


def _divide(chosen: Messages, rejected: Messages) -> tuple[list[Message], Messages, Messages]:
    """Return what two conversations begin with, and the rest of each: one message at least."""
    most = min(len(chosen), len(rejected)) - 1
    both = zip(chosen[: max(0, most)], rejected, strict=False)
    size = next((number for number, (one, other) in enumerate(both) if one != other), max(0, most))
    first, second = (messages[size : size + 1] for messages in (chosen, rejected))
    if any(message.role != ASSISTANT for message in (*first, *second)):
        raise DataError(
            '"chosen" and "rejected" have prompts that differ',
            got=" and ".join(repr(message.content)[: LETTERS // 2] for message in (*first, *second)),
            expected="the same messages up to the answers",
            cause=f"message {size + 1} of each is no answer to the same prompt",
        )
    return [*chosen[:size]], chosen[size:], rejected[size:]


def _read_judged(record: Mapping[str, Any], form: tuple[str, ...]) -> Judged:
    """Return an answer and its label, which stands under the last key."""
    desirable = record[form[-1]]
    if not isinstance(desirable, bool):
        raise DataError(f'"{form[-1]}" is no bool', got=shown(desirable), expected="true or false")
    if form[0] == "instruction":
        prompt, completion = alpaca_prompt(record), _answer(record, "output")
    elif form[0] == "prompt":
        prompt, completion = _question(record, "prompt"), _answer(record, "completion")
    else:
        *prompt, answer = read_messages(record, form[0]) or [Message(SYSTEM, "")]
        completion = (answer,)
    messages = _checked_prompt(with_system(record, prompt))
    _check_answer(completion, "of the record")
    return Judged(messages, completion, read_tools(record), desirable)


FORMS: dict[tuple[str, ...], Callable[[Mapping[str, Any], tuple[str, ...]], Pair | Judged]] = {
    **{
        (key, "chosen", "rejected"): _read_pair
        for key in ("context", "prompt", "conversations", "messages", "instruction", "question")
    },
    ("chosen", "rejected"): _read_implicit,
    ("prompt", "completion", "label"): _read_judged,
    **{(key, label): _read_judged for key in ("messages", "conversations") for label in ("label", "kto_tag")},
    ("instruction", "output", "kto_tag"): _read_judged,
}
"""The keys by which a form is known, in the order in which they are looked for, and what reads it."""
