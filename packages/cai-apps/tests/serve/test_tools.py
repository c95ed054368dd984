"""Calls of tools: read in the forms of published models, whole and letter by letter, and told in OpenAI's form."""

from __future__ import annotations

import json

import openai
import pytest

from cai_apps.serve.tools import CallReader

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "take")
]
ADD = '{"name": "add", "arguments": {"a": 2}}'
CASES = {
    "Hermes": (f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", {"a": 2})]),
    "Hermes, two after a text": (
        f"I add.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{ADD}</tool_call>",
        "I add.\n",
        [("add", {"a": 2})] * 2,
    ),
    "Hermes, not closed": (f"<tool_call>\n{ADD}", "", [("add", {"a": 2})]),
    "Mistral": (f"[TOOL_CALLS] [{ADD}, {ADD}]", "", [("add", {"a": 2})] * 2),
    "Mistral, later": ('[TOOL_CALLS]add[ARGS]{"a": 2}', "", [("add", {"a": 2})]),
    "Mistral, later, two": (
        '[TOOL_CALLS]add[ARGS]{"a": 2}[TOOL_CALLS]take[ARGS]{"a": 3}',
        "",
        [("add", {"a": 2}), ("take", {"a": 3})],
    ),
    "Llama": ('{"name": "add", "parameters": {"a": 2}}', "", [("add", {"a": 2})]),
    "Llama, two": (
        '<|python_tag|>{"name": "add", "parameters": {"a": 2}}; {"name": "take", "parameters": {"a": 1}}',
        "",
        [("add", {"a": 2}), ("take", {"a": 1})],
    ),
    "arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>',
        "",
        [("add", {"a": 2})],
    ),
    "an unknown tool": ('{"name": "shell", "parameters": {}}', '{"name": "shell", "parameters": {}}', []),
    "an unknown tool, marked": (
        '<tool_call>{"name": "shell", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "shell", "arguments": {}}</tool_call>',
        [],
    ),
    "JSON that is no call": ('{"sum": 4}', '{"sum": 4}', []),
    "broken JSON": (
        '<tool_call>{"name": "add", </tool_call> so',
        '<tool_call>{"name": "add", </tool_call> so',
        [],
    ),
    "a text with braces": (
        'It is {"name": "add", "arguments": {}}',
        'It is {"name": "add", "arguments": {}}',
        [],
    ),
    "a sign that begins like a mark": ("1 <tool 2", "1 <tool 2", []),
    "deep": ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
    "nothing": ("", "", []),
}


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("case", CASES)
def test_calls_are_read_however_their_text_comes(case, size):
    text, content, calls = CASES[case]
    if size == 1 and len(text) > 10_000:
        size = 1000
    reader, told, made = CallReader(["add", "take"]), "", []
    for start in range(0, len(text), size):
        new, some = reader.add(text[start : start + size], ends=False)
        told, made = told + new, made + some
    new, some = reader.add("", ends=True)
    assert told + new == content
    assert [(call.name, json.loads(call.arguments)) for call in made + some] == calls
    assert len({call.identity for call in made + some}) == len(calls)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": [0-9]\}\}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_a_call_is_told(client, choice, stream):
    named = {"type": "function", "function": {"name": "add"}}
    options = {"extra_body": {"regex": f"Sum: {CALL}"}} if choice == "auto" else {}
    answer = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "2 and 3?"}],
        tools=TOOLS,
        tool_choice=named if choice == "named" else choice,
        max_tokens=200,
        temperature=0,
        stream=stream,
        **options,
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        assert [call.index for call in calls] == [0]
    else:
        chunks = answer.choices
        calls, content = chunks[0].message.tool_calls, chunks[0].message.content or ""
    (call,) = calls
    assert chunks[-1].finish_reason == "tool_calls"
    assert call.id.startswith("call_") and call.type == "function"
    assert call.function.name == "add" if choice != "required" else call.function.name in ("add", "take")
    assert 0 <= json.loads(call.function.arguments)["a"] <= 9
    assert content.strip() == ("Sum:" if choice == "auto" else "")


def test_tools_and_their_answers_are_written_by_the_template(client, server, directory):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    calls = [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
    messages = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_call_id": "call_1"},
    ]
    answer = client.chat.completions.create(model="toy", messages=messages, tools=TOOLS, max_tokens=1)
    _, told = server.post("/tokenize", {"messages": messages, "tools": TOOLS})
    arguments = {"name": "add", "arguments": {"a": 2}}
    as_objects = [
        messages[0],
        {**messages[1], "content": "", "tool_calls": [{"function": arguments}]},
        messages[2],
    ]
    text = tokenizer.apply_chat_template(as_objects, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert told["tokens"] == tokenizer(text)["input_ids"]
    assert answer.usage.prompt_tokens == len(told["tokens"])


def test_a_tool_that_is_none_is_not_called(client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "2?"}],
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "shell"}},
        )
    assert raised.value.param == "tool_choice"
