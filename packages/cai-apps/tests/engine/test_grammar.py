"""Answers of a form: whatever a random model would like to say, it says JSON of the schema, or what a pattern asks."""

from __future__ import annotations

import json
import re

import pytest
from chat_tokenizers import tokenizer_of
from engine_toys import small_model

from cai_apps.engine import LLM, Engine, EngineOptions
from cai_mesh.errors import ConfigError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "is": {"enum": ["red", "blue"]},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 2,
        },
    },
    "required": ["name", "is", "numbers"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("bytes", ("<|end|>",), eos="<|end|>")


@pytest.fixture(scope="module")
def llm(tokenizer):
    """Blocks do not suffice for all requests, and the model has more rows than the tokenizer has tokens."""
    model = small_model("llama", vocab_size=len(tokenizer) + 9, eos_token_id=tokenizer.eos_token_id)
    llm = LLM(model, tokenizer, options=EngineOptions(block_size=4, requests=6))
    llm.engine = Engine(model, llm.engine.limits, 40, llm.engine.ends)
    return llm


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_json_of_a_schema(llm, temperature):
    prompts = ["Hello there", "It is 5", "be kind"]
    outputs = llm.generate(prompts, temperature=temperature, seed=3, max_tokens=120, n=3, json_schema=SCHEMA)
    for answer in (answer for output in outputs for answer in output.answers):
        record = json.loads(answer.text)
        assert answer.ending == "stop" and record.keys() == SCHEMA["properties"].keys()
        assert record["is"] in ("red", "blue") and all(0 <= number <= 99 for number in record["numbers"])
    assert llm.engine.pool.free == llm.engine.pool.count


def test_a_pattern_and_a_grammar(llm):
    (output,) = llm.generate(
        "It is", temperature=1.0, seed=1, max_tokens=40, regex="[0-9]{2,4} (apples|pears)"
    )
    assert re.fullmatch("[0-9]{2,4} (apples|pears)", output.text)
    lark = 'start: "yes" | "no" ", " reason\nreason: /[a-c]{3}/'
    (output,) = llm.generate("It is", temperature=1.0, seed=2, max_tokens=40, grammar=lark)
    assert output.text == "yes" or re.fullmatch("no, [a-c]{3}", output.text)


def test_forms_stand_beside_free_answers(llm):
    prompt = "Hello there"
    (alone,) = llm.generate(prompt, temperature=0, max_tokens=6)
    llm.generate([prompt] * 2, temperature=0, max_tokens=20, regex="(a|b)+c")
    assert llm.generate(prompt, temperature=0, max_tokens=6)[0].token_ids == alone.token_ids


@pytest.mark.parametrize(
    "options, words",
    [
        ({"json_schema": {"type": "nothing"}}, "json_schema is refused"),
        ({"json_schema": "{"}, "json_schema is refused"),
        ({"regex": "("}, "regex is refused"),
        ({"grammar": "start: nowhere"}, "grammar is refused"),
        ({"regex": "a", "grammar": 'start: "a"'}, "one form"),
    ],
)
def test_what_is_no_form_is_refused(llm, options, words):
    with pytest.raises(ConfigError, match=words):
        llm.generate("It is", **options)
    assert not llm.engine.requests and llm.engine.pool.free == llm.engine.pool.count


def test_forms_need_a_tokenizer():
    llm = LLM(small_model("llama"))
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        llm.generate([[1, 2]], regex="a")
    assert not llm.engine.requests
