"""The forms in which files have conversations, and what is refused of them."""

from __future__ import annotations

import pytest

from cai_apps.data.chat.messages import Conversation, Message, read_conversation
from cai_mesh.errors import DataError

QUESTION, ANSWER = Message("user", "q"), Message("assistant", "a")
PLAIN = Conversation((QUESTION, ANSWER))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def call(**arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


FORMS = {
    "OpenAI, transformers": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "ColossalChat": {"messages": [{"from": "human", "content": "q"}, {"from": "Assistant", "content": "a"}]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "parts of text": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "a"}]},
        ]
    },
    "keys without a value, as parquet fills them in": {
        "messages": [
            {"role": "user", "content": "q", "tool_calls": None, "from": None},
            {"role": "assistant", "content": "a", "weight": None},
        ],
        "prompt": None,
        "tools": None,
    },
    "Alpaca": {"instruction": "q", "input": "", "output": "a"},
    "messages beside a prompt": {"prompt": "q", "messages": [{"role": "user", "content": "q"},
                                                             {"role": "assistant", "content": "a"}]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read(form):
    assert read_conversation(FORMS[form]) == PLAIN


def test_a_prompt_is_not_trained_on():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    strings = read_conversation({"prompt": "q", "completion": "a"})
    assert [message.trained for message in strings.messages] == [False, True]
    lists = read_conversation({"prompt": [*messages, messages[0]], "completion": [messages[1]]})
    assert [message.trained for message in lists.messages] == [False, False, False, True]


def test_alpaca_has_input_system_and_history():
    record = {
        "instruction": "Add.",
        "input": "1 and 2",
        "output": "3",
        "system": "Be brief.",
        "history": [["q", "a"]],
    }
    assert [(message.role, message.content) for message in read_conversation(record).messages] == [
        ("system", "Be brief."), ("user", "q"), ("assistant", "a"), ("user", "Add.\n1 and 2"), ("assistant", "3"),
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'])
def test_calls_and_tools_of_openai(arguments):
    record = {
        "messages": [
            {"role": "developer", "content": "S"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None,
             "tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}]},
            {"role": "tool", "tool_call_id": "x", "name": "add", "content": "5"},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "weight": 0},
        ],
        "tools": [TOOL],
    }  # fmt: skip
    conversation = read_conversation(record)
    assert conversation.tools == (TOOL,)
    system, _, calls, answer, last = conversation.messages
    assert (system.role, calls.content) == ("system", "")
    assert calls.tool_calls == ({"id": "x", **call(a=2)},)
    assert (answer.tool_call_id, answer.name) == ("x", "add")
    assert (last.reasoning, last.trained) == ("r", False)


def test_calls_and_tools_of_sharegpt():
    """Calls that follow one another are one message, and a system's text may stand beside the messages."""
    record = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
            {"from": "function_call", "value": '[{"name": "add", "arguments": {}}]'},
            {"from": "observation", "value": "5"},
            {"from": "gpt", "value": "a"},
        ],
        "system": "S",
        "tools": '[{"name": "add", "parameters": {}}]',
    }
    conversation = read_conversation(record)
    assert [message.role for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert conversation.messages[2].tool_calls == (call(a=2), call())
    assert conversation.tools == (TOOL,)


def of(*messages):
    return {"messages": list(messages)}


BROKEN = {
    "unknown role": (of({"role": "asistant", "content": "a"}), ("unknown role", "'asistant'", "mean 'assistant'")),
    "no role": (of({"content": "a"}), ("message 1 has no role", "'content'")),
    "a role that is no text": (of({"role": 3, "content": "a"}), ("no role", "int 3")),
    "empty answer": (of({"role": "assistant", "content": " \n"}), ("the answer is empty", "message 1")),
    "no content": (of({"role": "user"}), ("message 1 has no content",)),
    "content of a wrong type": (of({"role": "user", "content": {"a": 1}}), ("wrong type", "dict")),
    "a picture": (of({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}), ("no text", "image_url")),
    "a message that is no object": (of("hi"), ("message 1 is no object", "str 'hi'")),
    "messages that are no list": ({"messages": {"role": "user"}}, ('"messages" is no list', "dict")),
    "messages as text that is no JSON": ({"messages": "[{"}, ("is no JSON",)),
    "no message": ({"messages": []}, ("no message",)),
    "a key that is nearly one": ({"mesages": []}, ("no conversation of a form", "did you mean 'messages'")),
    "no key that is known": ({"text": "a"}, ("no conversation of a form", "'text'", "'instruction' and 'output'")),
    "a prompt alone": ({"prompt": "q", "completions": "a"}, ('"prompt" and no "completion"', "mean 'completions'")),
    "a completion that is empty": ({"prompt": "q", "completion": ""}, ("the answer is empty", '"completion"')),
    "output of a wrong type": ({"instruction": "q", "output": 3}, ('"output" is of a wrong type', "int 3")),
    "history of a wrong form": ({"instruction": "q", "output": "a", "history": ["q"]}, ('entry 1 of "history"',)),
    "two system messages": (
        {"system": "S", **of({"role": "system", "content": "T"}, {"role": "assistant", "content": "a"})},
        ("two system messages",),
    ),
    "a weight": (of({"role": "assistant", "content": "a", "weight": 0.5}), ("unknown weight", "0.5")),
    "arguments that are no JSON": (
        of({"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{a"}}]}),
        ("what 'add' is called with in message 1 is no JSON", "'{a'"),
    ),
    "arguments that are a list": (
        of({"role": "assistant", "tool_calls": [{"name": "add", "arguments": "[1]"}]}), ("is no object", "list"),
    ),
    "a call without a name": (of({"role": "assistant", "tool_calls": [{"arguments": {}}]}), ("call of message 1",)),
    "calls that are no list": (of({"role": "assistant", "tool_calls": 3}), ("message 1 calls is no list",)),
    "a function call that is no JSON": (
        {"conversations": [{"from": "function_call", "value": "add(2)"}]}, ("message 1 is no JSON", "add(2)"),
    ),
    "tools without a name": ({"tools": [{"type": "function"}], **FORMS["ShareGPT"]}, ("tool 1 has no name",)),
    "tools that are no JSON": ({"tools": "add", **FORMS["ShareGPT"]}, ('the "tools" of the record is no JSON',)),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_refused(case):
    record, words = BROKEN[case]
    with pytest.raises(DataError) as caught:
        read_conversation(record)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)
