"""The forms in which files have preferences, and what is refused of them."""

from __future__ import annotations

import math

import pytest

from cai_apps.data.chat.messages import Message
from cai_apps.data.preference.records import Judged, Pair, kind_of, read_preference
from cai_mesh.errors import DataError

QUESTION = Message("user", "q", trained=False)
GOOD, BAD = Message("assistant", "a"), Message("assistant", "b")
PLAIN = Pair((QUESTION,), (GOOD,), (BAD,), None, None)
USER = {"role": "user", "content": "q"}
CHOSEN, REJECTED = ({"role": "assistant", "content": text} for text in "ab")
SYSTEM = {"role": "system", "content": "S"}
HH = "\n\nHuman: {}\n\nAssistant: {}"

PAIRS = {
    "ColossalChat": {"context": [{"from": "human", "content": "q"}],
                     "chosen": [{"from": "assistant", "content": "a"}],
                     "rejected": [{"from": "assistant", "content": "b"}]},
    "trl, strings": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "trl, messages": {"prompt": [USER], "chosen": [CHOSEN], "rejected": [REJECTED]},
    "trl, without a prompt": {"chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
    "Anthropic's HH": {"chosen": HH.format("q", "a"), "rejected": HH.format("q", "b")},
    "UltraFeedback": {"prompt": "q", "prompt_id": "1", "chosen": [USER, CHOSEN], "rejected": [USER, REJECTED],
                      "messages": [USER, CHOSEN], "score_chosen": 8.0, "score_rejected": 2.0},
    "LLaMA-Factory": {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"},
                      "rejected": {"from": "gpt", "value": "b"}},
    "LLaMA-Factory, OpenAI's messages": {"messages": [USER], "chosen": CHOSEN, "rejected": REJECTED},
    "Alpaca": {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
    "Intel's Orca": {"system": "", "question": "q", "chosen": "a", "rejected": "b"},
    "keys without a value, as parquet fills them in": {
        "prompt": "q", "chosen": [{**CHOSEN, "tool_calls": None}], "rejected": [REJECTED], "context": None,
        "margin": None, "tools": None,
    },
}  # fmt: skip
JUDGED = {
    "trl, strings": {"prompt": "q", "completion": "a", "label": True},
    "trl, messages": {"prompt": [USER], "completion": [CHOSEN], "label": True},
    "LLaMA-Factory": {"messages": [USER, CHOSEN], "label": True},
    "LLaMA-Factory, another tag": {"messages": [USER, CHOSEN], "kto_tag": True},
    "LLaMA-Factory, ShareGPT": {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        "kto_tag": True,
    },
    "Alpaca": {"instruction": "q", "input": "", "output": "a", "kto_tag": True},
}


@pytest.mark.parametrize("form", PAIRS)
def test_a_form_of_pairs_is_read(form):
    assert read_preference(PAIRS[form]) == PLAIN
    assert kind_of(PAIRS[form]) == "pairs"


@pytest.mark.parametrize("form", JUDGED)
def test_a_form_of_judged_answers_is_read(form):
    assert read_preference(JUDGED[form]) == Judged((QUESTION,), (GOOD,), None, True)
    assert kind_of(JUDGED[form]) == "judged"
    label = "label" if "label" in JUDGED[form] else "kto_tag"
    assert not read_preference({**JUDGED[form], label: False}).desirable


def test_what_is_no_preference():
    conversations = (
        {"messages": [USER, CHOSEN]},
        {"prompt": "q", "completion": "a"},
        {"messages": [], "label": "x"},
    )
    assert [kind_of(record) for record in conversations] == [None] * 3


def test_several_turns_tools_and_margin():
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"role": "assistant", "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]}  # fmt: skip
    record = {"prompt": [SYSTEM, USER, call, {"role": "tool", "content": "5"}], "chosen": [CHOSEN],
              "rejected": [REJECTED], "tools": [tool], "margin": 2}  # fmt: skip
    pair = read_preference(record)
    assert [message.role for message in pair.prompt] == ["system", "user", "assistant", "tool"]
    assert not any(message.trained for message in pair.prompt)
    assert (pair.tools, pair.margin) == ((tool,), 2.0)
    assert all(message.trained for message in (*pair.chosen, *pair.rejected))


def test_the_prompt_is_what_both_begin_with():
    shared = [USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": "q2"}]
    pair = read_preference({"chosen": [*shared, CHOSEN], "rejected": [*shared, REJECTED]})
    assert [message.content for message in pair.prompt] == ["q", "x", "q2"]
    pair = read_preference({"chosen": [*shared, CHOSEN], "rejected": [USER, REJECTED]})
    assert [message.content for message in pair.prompt] == ["q"]
    assert [message.content for message in pair.chosen] == ["x", "q2", "a"]
    pair = read_preference({"chosen": HH.format("q", "x") + HH.format("q2", "a  "),
                            "rejected": HH.format("q", "x") + HH.format("q2", "b\n\nc\n\n")})  # fmt: skip
    assert [message.content for message in (*pair.prompt, *pair.rejected)] == ["q", "x", "q2", "b\n\nc"]


def test_the_prompt_of_conversations_is_that_of_trl():
    extract_prompt = pytest.importorskip("trl.data_utils").extract_prompt
    turns = [USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": "q2"}]
    for record in (
        {"chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
        {"chosen": [SYSTEM, *turns, CHOSEN], "rejected": [SYSTEM, *turns, REJECTED]},
        {"chosen": [*turns, CHOSEN], "rejected": [USER, REJECTED, turns[2], REJECTED]},
    ):
        assert read_preference(record) == read_preference(extract_prompt(record))


@pytest.mark.parametrize("where", ["beside", "in the prompt", "in the answers", "in both"])
def test_a_system_message_may_stand_in_any_place(where):
    begun = [SYSTEM, USER] if where in ("in the answers", "in both") else [USER]
    record = {
        "prompt": [SYSTEM, USER] if where in ("in the prompt", "in both") else "q",
        "chosen": [*begun, CHOSEN],
        "rejected": [*begun, REJECTED],
        "system": "S" if where == "beside" else None,
    }
    assert [message.content for message in read_preference(record).prompt] == ["S", "q"]
    with pytest.raises(DataError):
        read_preference({**record, "prompt": [{**SYSTEM, "content": "T"}, USER], "system": "S"})


REFUSED = {
    "the same answers": ({"prompt": "q", "chosen": "a", "rejected": "a"}, '"chosen" equals "rejected"'),
    "the same conversations": ({"chosen": [USER, CHOSEN], "rejected": [USER, CHOSEN]}, '"chosen" equals "rejected"'),
    "an empty answer": ({"prompt": "q", "chosen": "a", "rejected": " "}, "the answer is empty"),
    "an empty answer of HH": (
        {"chosen": HH.format("q", "a"), "rejected": HH.format("q", "")}, "the answer is empty: message 2"),
    "no answer": ({"prompt": "q", "chosen": [], "rejected": [REJECTED]}, "does not begin with an assistant's message"),
    "prompts that differ": (
        {"chosen": [USER, CHOSEN], "rejected": [{**USER, "content": "other"}, REJECTED]}, "prompts that differ"),
    "questions that differ later": (
        {"chosen": [USER, CHOSEN, USER, CHOSEN],
         "rejected": [USER, CHOSEN, {**USER, "content": "other"}, REJECTED]},
        "message 3 of each"),
    "prompts of HH that differ": (
        {"chosen": HH.format("q", "a"), "rejected": HH.format("other", "b")}, "prompts that differ"),
    "a prompt beside another": (
        {"prompt": "other", "chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]}, "begin with another prompt"),
    "one whole conversation beside an answer": (
        {"prompt": "q", "chosen": [USER, CHOSEN], "rejected": [REJECTED]}, "prompts that differ"),
    "a conversation without an answer": ({"chosen": [USER], "rejected": [USER]}, "prompts that differ"),
    "answers alone": ({"chosen": [CHOSEN], "rejected": [REJECTED]}, "the prompt is empty"),
    "no messages": ({"chosen": [], "rejected": [USER, REJECTED]}, "prompts that differ"),
    "strings without a prompt": (
        {"chosen": "the sky is blue", "rejected": "the sky is green"}, "does not say where its prompt ends"),
    "a prompt that is an answer": (
        {"prompt": [USER, CHOSEN], "chosen": [CHOSEN], "rejected": [REJECTED]}, "the prompt ends with an answer"),
    "no prompt": ({"prompt": [], "chosen": "a", "rejected": "b"}, "the prompt is empty"),
    "a margin of text": ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "1"}, "no finite number"),
    "a margin of a bool": ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": True}, "no finite number"),
    "a margin without an end": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": math.inf}, "no finite number"),
    "a label of text": ({"prompt": "q", "completion": "a", "label": "true"}, '"label" is no bool'),
    "a label of a number": ({"prompt": "q", "completion": "a", "label": 1}, '"label" is no bool'),
    "no label": ({"prompt": "q", "completion": "a"}, 'has "prompt" and "completion" and no "label"'),
    "a label without a value": ({"messages": [USER, CHOSEN], "label": None}, 'no "label"'),
    "a conversation": ({"messages": [USER, CHOSEN]}, "a conversation without a judgement of its answer"),
    "no message": ({"messages": [], "label": True}, "the prompt is empty"),
    "an answer of the user": ({"messages": [USER, USER], "label": True}, "does not begin with an assistant's message"),
    "no rejected answer": ({"prompt": "q", "chosen": "a", "reject": "b"}, "did you mean 'reject'?"),
    "no form": ({"qestion": "q", "chosn": "a"}, "did you mean"),
    "no key": ({}, "no preference of a form that is known"),
    "an unknown role": ({"prompt": "q", "chosen": [{**CHOSEN, "role": "asistant"}], "rejected": "b"}, "unknown role"),
    "a list of other things": ({"prompt": "q", "chosen": 3, "rejected": "b"}, '"chosen" is no list'),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(case):
    record, words = REFUSED[case]
    with pytest.raises(DataError) as caught:
        read_preference(record)
    assert words in str(caught.value), str(caught.value)
