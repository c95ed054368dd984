"""Which template writes a conversation, and what is refused of templates and tokenizers."""

from __future__ import annotations

import logging

import pytest
from chat_templates import CHATML, QWEN, WITH_CALL, turns
from chat_tokenizers import setting, tokenizer_of

from cai_apps.data.chat.messages import read_conversation
from cai_apps.data.chat.render import Renderer
from cai_apps.data.chat.template import DATE, ChatTemplate, load_template
from cai_mesh.errors import ConfigError, DataError

CONVERSATION = read_conversation(turns("Hi", "Hello!"))


def tokenizer(template, family="bytes"):
    return tokenizer_of(family, CHATML.tokens, eos=CHATML.eos, template=template)


def test_a_file_is_used_in_place_of_the_tokenizers_own(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}", encoding="utf-8-sig"
    )
    template = load_template(tokenizer(CHATML.template), str(file))
    assert template.write(CONVERSATION).text == "user:Hi<|im_end|>assistant:Hello!<|im_end|>"
    assert template.digest != load_template(tokenizer(CHATML.template)).digest


def test_a_tokenizer_with_a_template_for_tools():
    template = load_template(tokenizer({"default": CHATML.template, "tool_use": QWEN.template}))
    assert template.source(CONVERSATION) == CHATML.template
    assert template.source(read_conversation(WITH_CALL)) == QWEN.template


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, ("has no chat template", "data.chat_template", "instruct")),
        ("", ("has no chat template",)),
        ({"rag": "x", "tool_use": "y"}, ("none is the default", "rag, tool_use")),
        ("{% for m in messages %}", ("the tokenizer's chat template is broken", "line 1")),
        ("\n{{ 'a' + }}", ("is broken", "line 2")),
        ("{{ strftime_now('%d %B') }}{{ messages }}", ("writes today's date", "strftime_now")),
    ],
)
def test_a_template_that_cannot_be_used(template, words):
    with pytest.raises(ConfigError) as caught:
        load_template(tokenizer(template))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [(None, "No such file"), (b"", "is empty"), (b"\xff", "cannot be read"), ("folder", "Is a directory")],
)
def test_a_file_that_cannot_be_used(content, word, tmp_path):
    file = tmp_path / "template.jinja"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_template(tokenizer(None), str(file))
    assert word in str(caught.value) and str(file) in str(caught.value)


def test_a_date_that_may_be_said_is_the_same_every_day():
    """Llama 3's form: two days would be two data sets."""
    text = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    template = load_template(tokenizer(text + "Today: {{ date_string }}"))
    assert template.write(CONVERSATION).text == f"Today: {DATE}"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{{ raise_exception('Only a\ntable') }}", "Only a"),
        ("{{ messages[0].content + 3 }}", "can only concatenate"),
        ("{{ messages.nothing.more }}", "no attribute"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_a_template_raises_is_its_refusal(text, cause):
    with pytest.raises(DataError) as caught:
        load_template(tokenizer(text)).write(CONVERSATION)
    assert "refuses the conversation" in str(caught.value) and cause in str(caught.value)
    assert "user, assistant" in str(caught.value)


def test_a_template_without_generation_makes_no_noise(caplog):
    with caplog.at_level(logging.WARNING):
        load_template(tokenizer(CHATML.template)).write(CONVERSATION)
    assert not caplog.records


def test_a_tokenizer_that_does_not_say_its_letters_is_refused():
    from transformers import PreTrainedTokenizer

    class Slow(PreTrainedTokenizer):
        vocab_size = 3

        def get_vocab(self):
            return {"a": 0}

        def _tokenize(self, text):
            return list(text)

        def _convert_token_to_id(self, token):
            return 0

    slow = Slow(eos_token="</s>", chat_template=CHATML.template)
    with pytest.raises(ConfigError, match="which letters a token stands for"):
        Renderer(slow, ChatTemplate({"default": CHATML.template}, {}, "x"))


def test_rendering_leaves_the_tokenizer_as_it_is():
    its = setting(CHATML, "trimmed bytes")
    before = its.tokenizer.backend_tokenizer.to_str()
    Renderer(its.tokenizer, its.template).render(read_conversation(turns("<|im_end|>", "Hello!")))
    assert its.tokenizer.backend_tokenizer.to_str() == before
