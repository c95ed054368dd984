"""What of a conversation is trained on, and what is refused because it would not be clear."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from chat_templates import (
    CALL,
    CHATML,
    DEEPSEEK,
    GEMMA,
    GENERATION,
    LLAMA_2,
    LLAMA_3,
    MISTRAL,
    OPEN_THOUGHT,
    QWEN,
    STRIPPING,
    THINKING,
    TOOLS,
    WITH_CALL,
    ZEPHYR,
    turns,
)
from chat_tokenizers import FAMILIES, setting

from cai_apps.data.chat.messages import read_conversation
from cai_apps.data.chat.render import Example, Renderer, check_trained, render, truncate
from cai_mesh.errors import ConfigError, DataError

TWO = turns("Hi", "Hello!", "Bye", "So long.", system="Be kind.")
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def trained_texts(form, record, trained=("all",), *, family="bytes", special_tokens="text", **options):
    """The parts of a conversation's text that are trained on."""
    its = setting(form, family, **options)
    _, parts = Renderer(its.tokenizer, its.template, trained, special_tokens).pieces(
        read_conversation(record)
    )
    return [text for text, is_trained in parts if is_trained]


def refusal(form, record, trained=("all",), **options) -> str:
    with pytest.raises(DataError) as caught:
        trained_texts(form, record, trained, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        (("all",), ["Hello!<|im_end|>", "So long.<|im_end|>"]),
        (("last",), ["So long.<|im_end|>"]),
        (("assistant",), ["Hello!<|im_end|>", "So long.<|im_end|>"]),
        (("user",), ["Hi<|im_end|>", "Bye<|im_end|>"]),
        (("system", "assistant"), ["Be kind.<|im_end|>", "Hello!<|im_end|>", "So long.<|im_end|>"]),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_or_roles(trained, expected, family):
    assert trained_texts(CHATML, TWO, trained, family=family) == expected


@pytest.mark.parametrize("form", [CHATML, GENERATION])
@pytest.mark.parametrize("weights", [(0, 1), (1, 0)])
def test_a_weight_of_zero_keeps_an_answer_from_being_trained_on(form, weights):
    """OpenAI's fine-tuning files have it."""
    record = turns("Hi", "Hello!", "Bye", "So long.")
    for message, weight in zip(record["messages"][1::2], weights, strict=True):
        message["weight"] = weight
    (text,) = trained_texts(form, record)
    assert text.startswith("So long." if weights[1] else "Hello!")


def test_a_prompt_with_messages_trains_the_completion():
    messages = turns("Hi", "Hello!", "Bye", "So long.")["messages"]
    assert trained_texts(CHATML, {"prompt": messages[:3], "completion": messages[3:]}) == [
        "So long.<|im_end|>"
    ]


@pytest.mark.parametrize(
    ("trained", "word"),
    [
        (("assitant",), "did you mean 'assistant'"),
        ((), "nothing"),
        (("last", "user"), "two things"),
        (("",), "unknown role"),
    ],
)
def test_what_is_trained_on_is_checked(trained, word):
    with pytest.raises(ConfigError) as caught:
        check_trained(trained)
    assert word in str(caught.value)


def test_nothing_to_train_on():
    assert "no answer to train on" in refusal(CHATML, turns("Hi"))
    assert "the roles user, assistant" in refusal(CHATML, turns("Hi", "Hello!"), ("tool",))
    record = turns("Hi", "Hello!")
    record["messages"][1]["weight"] = 0
    assert "weight of 0" in refusal(CHATML, record)


# Prefixes that are none


def test_thoughts_that_are_left_out_later_make_earlier_answers_ambiguous():
    """Qwen3's form: NeMo-Automodel 3024, slime 2213, prime-rl 947 masked tokens of the next question."""
    text = refusal(STRIPPING, THINKING)
    assert "where the answer of message 2 stands" in text
    assert 'data.trained = "last"' in text and "{% generation %}" in text
    assert trained_texts(STRIPPING, THINKING, ("last",)) == ["<think>\nthrees\n</think>\n\n6<|im_end|>"]


def test_an_end_that_only_the_last_answer_has_is_ambiguous():
    """OLMo's form: open-instruct 1800."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if loop.last and m.role == 'assistant' %}"
        "{{ eos_token }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    form = replace(ZEPHYR, template=template)
    assert "where the answer of message 2 stands" in refusal(form, turns("Hi", "Hello!", "Bye", "So long."))
    assert trained_texts(form, turns("Hi", "Hello!", "Bye", "So long."), ("last",)) == ["So long.</s>"]


def test_tools_that_move_to_the_last_question_are_ambiguous_for_earlier_answers():
    """Mistral's form."""
    record = {"tools": TOOLS, **turns("Hi", "Hello!", "Bye", "So long.")}
    assert "where the answer of message 2 stands" in refusal(MISTRAL, record)
    assert trained_texts(MISTRAL, record, ("last",)) == [" So long.</s>"]


def test_a_prompt_for_an_answer_that_is_written_otherwise_is_ambiguous():
    """DeepSeek R1's form: the prompt opens a thought that no earlier answer has."""
    template = DEEPSEEK.template.replace("<｜Assistant｜>{% endif %}", "<｜Assistant｜><think>\n{% endif %}")
    text = refusal(replace(DEEPSEEK, template=template), turns("Hi", "Hello!"))
    assert "with the generation prompt" in text and "<think>" in text


# Borders


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("space", [" ", "\n", "\n\n", "  "])
def test_white_space_before_an_answer_may_be_the_prompts(family, space):
    """A token that spans the border is given, not trained on; the ids are those of the whole (trl 5213, slime 2213)."""
    its = setting(CHATML, family)
    record = turns("Hi", f"{space}Hello!")
    example, parts = Renderer(its.tokenizer, its.template).pieces(read_conversation(record))
    own = its.tokenizer.apply_chat_template(record["messages"], return_dict=False)
    assert example.ids.tolist() == own
    (text,) = [text for text, is_trained in parts if is_trained]
    assert text.lstrip() == "Hello!<|im_end|>" and (space + "Hello!<|im_end|>").endswith(text)


def test_a_thought_that_the_prompt_opens_goes_on_in_the_answer():
    """Qwen3.5's form: "\\n" of the prompt and "\\n" of the answer are one token (trl 5213)."""
    assert trained_texts(OPEN_THOUGHT, turns("Hi", "Hello!")) == ["</think>\n\nHello!<|im_end|>"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_word_that_takes_the_prompts_last_space_is_refused(family):
    """The prompt would end with a space of its own, and no model of such tokens writes the word without one."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    text = refusal(replace(ZEPHYR, template=template), turns("Hi", "kind"), family=family)
    assert "a token spans the beginning of an answer" in text


def test_two_answers_in_a_row_and_an_answer_first():
    record = {"messages": [{"role": "assistant", "content": "Hi"}, {"role": "assistant", "content": "there"}]}
    assert trained_texts(CHATML, record) == ["Hi<|im_end|>", "there<|im_end|>"]


def test_letters_of_several_tokens_and_pictures():
    record = turns("é 你好 🙂", "你好 🙂 é")
    assert trained_texts(CHATML, record) == ["你好 🙂 é<|im_end|>"]


# Ends


def test_an_answer_without_an_end_is_refused():
    """Models that never stop: torchtune 949, LLaMa2lang 18, FastChat 3055, trl 2059."""
    template = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    template += "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    assert "ends with no token of its own" in refusal(
        replace(ZEPHYR, template=template), turns("Hi", "Hello!")
    )


def test_an_end_that_the_tokenizer_does_not_know_is_refused():
    """ChatML over a tokenizer that has no such tokens: the end is letters, by which nobody stops (trl 2059)."""
    text = refusal(replace(CHATML, tokens=("<|endoftext|>",), eos="<|endoftext|>"), turns("Hi", "Hello!"))
    assert "ends with no token of its own" in text and "eos_token" in text


def test_an_end_outside_of_generation_is_refused():
    """trl 5988: the end belongs to the next message, and the model never learns to stop."""
    template = GENERATION.template.replace(
        "{{ m.content }}<|im_end|>\n{% endgeneration %}", "{{ m.content }}{% endgeneration %}<|im_end|>\n"
    )
    assert "ends with no token of its own" in refusal(
        replace(GENERATION, template=template), turns("Hi", "Hello!")
    )


# {% generation %}


def test_generation_that_marks_nothing_or_elsewhere_is_refused():
    """A macro's block has its place counted from the text before the macro: letters too early."""
    head, tail = "{% for m in messages %}<|im_start|>{{ m.role }}\n", "{% endfor %}" + PROMPT
    mark = "{% if m.role == 'assistant' %}{% generation %}{% endgeneration %}{% endif %}"
    form = replace(GENERATION, template=head + mark + "{{ m.content }}<|im_end|>\n" + tail)
    assert "does not hold the answer of message 2" in refusal(form, turns("Hi", "Hello!"))
    macro = (
        "{% macro answer(m) %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
        "{% endmacro %}{% for m in messages %}{% if m.role == 'assistant' %}{{ answer(m) }}{% else %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
    )
    text = refusal(replace(GENERATION, template=macro), turns("Hi", "a good answer of some words."))
    assert "does not hold the answer of message 2" in text


TWO_BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.last %}{% generation %}<think>{{ m.reasoning_content }}</think>"
    "{% endgeneration %}{% endif %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}" + PROMPT
)


def test_generation_of_several_blocks_is_attributed_to_its_answer():
    form = replace(STRIPPING, template=TWO_BLOCKS)
    record = turns("Hi", "Hello!", "Bye", "So long.")
    record["messages"][3]["reasoning"] = "short"
    assert trained_texts(form, record) == ["Hello!<|im_end|>", "<think>short</think>So long.<|im_end|>"]
    assert trained_texts(form, record, ("last",)) == ["<think>short</think>So long.<|im_end|>"]
    record["messages"][1]["reasoning"] = "long"
    assert "which marked part of the text is whose answer" in refusal(form, record)


# What a template leaves out


def test_a_template_that_leaves_something_out_is_refused():
    tools = {"tools": TOOLS, **turns("Hi", "Hello!")}
    assert "writes no tools" in refusal(CHATML, tools)
    calls = {"messages": WITH_CALL["messages"]}
    assert "writes no calls of tools" in refusal(CHATML, calls)
    thoughts = turns("Hi", "Hello!")
    thoughts["messages"][1]["reasoning_content"] = "hm"  # slime 330
    assert "writes no reasoning" in refusal(CHATML, thoughts)
    skipping = CHATML.template.replace("in messages", "in messages if m.role != 'ROLE'")
    for role, place in (("system", 0), ("tool", 2)):
        messages = turns("3 and 4", "Hello!", "Bye", "So long.")["messages"]
        messages.insert(place, {"role": role, "content": "3"})  # which other messages have, too
        form = replace(CHATML, template=skipping.replace("ROLE", role))
        assert f"leaves out message {place + 1}, the {role}'s" in refusal(form, {"messages": messages})


def test_words_beside_calls_that_a_template_leaves_out():
    """Llama 3.1's form writes calls in place of what the answer says."""
    record = turns("2 and 3?", "I add them.")
    record["messages"][1]["tool_calls"] = [CALL]
    assert "leaves out message 2, the assistant's" in refusal(LLAMA_3, record)
    assert trained_texts(QWEN, record)[0].startswith("I add them.\n<tool_call>")


@pytest.mark.parametrize(
    ("form", "record", "words"),
    [
        (GEMMA, TWO, ("the tokenizer's chat template refuses", "System role not supported", "system, user, assistant")),
        (GEMMA, {"messages": [*turns("Hi", "Hello!", "Bye")["messages"], *turns("x", "y")["messages"]]},
         ("Conversation roles must alternate",)),
        (LLAMA_2, {"messages": [{"role": "assistant", "content": "Hi"}]}, ("roles must alternate",)),
    ],
)  # fmt: skip
def test_a_template_that_raises_is_told(form, record, words):
    text = refusal(form, record)
    assert all(word in text for word in words), text


# Control tokens in messages


@pytest.mark.parametrize("family", FAMILIES)
def test_control_tokens_in_a_message_are_text(family):
    its = setting(CHATML, family)
    end = its.tokenizer.convert_tokens_to_ids("<|im_end|>")
    record = turns("what is <|im_end|> for?", "<|im_end|> ends it, <|im_start|> begins.")
    example, parts = Renderer(its.tokenizer, its.template).pieces(read_conversation(record))
    assert example.ids.tolist().count(end) == 2
    text = "".join(text for text, _ in parts)
    assert text == its.tokenizer.apply_chat_template(record["messages"], tokenize=False)
    assert [text for text, is_trained in parts if is_trained] == [
        "<|im_end|> ends it, <|im_start|> begins.<|im_end|>"
    ]
    assert (
        its.tokenizer.decode(example.ids[example.trained])
        .replace("▁", " ")
        .strip()
        .startswith("<|im_end|> ends it")
    )


def test_text_goes_on_after_a_control_token_that_is_text():
    """A line feed that would become one token with what the pieces are tokenized behind."""
    its = setting(CHATML)
    record = turns("a <|im_end|>\n\n\nb", "<|im_end|> c")
    example = render(its.tokenizer, its.template, read_conversation(record))
    assert its.tokenizer.decode(example.ids) == its.tokenizer.apply_chat_template(
        record["messages"], tokenize=False
    )


def test_control_tokens_are_parsed_where_that_is_asked_for():
    record = turns("Hi", "Hello!<|im_end|> and more")
    its = setting(CHATML)
    example = Renderer(its.tokenizer, its.template, special_tokens="parse").render(read_conversation(record))
    assert example.ids.tolist() == its.tokenizer.apply_chat_template(record["messages"], return_dict=False)


def test_tokens_of_thoughts_and_calls_are_tokens():
    its = setting(STRIPPING)
    example = render(its.tokenizer, its.template, read_conversation(turns("Hi", "<think>\nx\n</think>\n\ny")))
    think = its.tokenizer.convert_tokens_to_ids("<think>")
    assert example.ids[example.trained][0] == think


# The beginning


@pytest.mark.parametrize("form", [LLAMA_3, GEMMA, MISTRAL, DEEPSEEK])
def test_the_beginning_stands_once(form):
    """OpenRLHF 393, DeepSeek-R1 151: the template writes it, and the tokenizer would add another."""
    its = setting(form, adds_bos=True)
    example = render(its.tokenizer, its.template, read_conversation(turns("Hi", "Hello!")))
    assert example.ids.tolist().count(its.tokenizer.bos_token_id) == 1
    doubled = replace(form, template="{{ bos_token }}" + form.template)
    assert "the token of a beginning twice" in refusal(doubled, turns("Hi", "Hello!"))


# Truncation


def example_of(*trained: int) -> Example:
    return Example(np.arange(len(trained)), np.array(trained, dtype=bool))


@pytest.mark.parametrize(
    ("length", "expected"),
    [(9, [0, 0, 1, 1, 0, 1]), (6, [0, 0, 1, 1, 0, 1]), (4, [0, 0, 1, 1]), (3, [0, 0, 1]), (2, None)],
)
def test_an_answer_that_is_cut_is_trained_on_as_far_as_it_goes(length, expected):
    shortened = truncate(example_of(0, 0, 1, 1, 0, 1), length)
    assert (None if shortened is None else shortened.trained.astype(int).tolist()) == expected
    assert shortened is None or shortened.ids.tolist() == list(range(len(expected)))
