"""The published client of OpenAI against a server in another process; answers are those of transformers' generate."""

from __future__ import annotations

import json
import math

import openai
import pytest
import torch
from engine_toys import written
from transformers import AutoModelForCausalLM, AutoTokenizer

from cai_apps.engine import LLM, Sampling

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Parse the arguments."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(directory):
    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


def greedy(model, tokenizer, text, tokens):
    """What transformers writes, as text, and its ids."""
    ids = written(model, tokenizer(text)["input_ids"], tokens)
    return tokenizer.decode(ids, skip_special_tokens=True), ids


def test_models_are_listed_and_told_by_name(client):
    assert [model.id for model in client.models.list()] == ["toy", "tuned"]
    assert client.models.retrieve("tuned").id == "tuned"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("../toy")
    assert raised.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_greedy_completions_are_those_of_transformers(client, model, tokenizer, stream):
    prompts = ["def parse(", "class Action", "The"]
    answer = client.completions.create(
        model="toy", prompt=prompts, max_tokens=24, temperature=0, stream=stream, logprobs=1
    )
    texts, tokens = ["", "", ""], [[], [], []]
    for choice in [c for chunk in answer for c in chunk.choices] if stream else answer.choices:
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens
    for number, prompt in enumerate(prompts):
        text, ids = greedy(model, tokenizer, prompt, 24)
        assert texts[number] == text
        assert tokens[number] == [tokenizer.decode([token]) for token in ids]


@pytest.mark.parametrize("stream", [False, True])
def test_greedy_chats_are_those_of_transformers(client, model, tokenizer, stream):
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    text, ids = greedy(model, tokenizer, prompt, 20)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.chat.completions.create(
        model="toy", messages=CHAT, max_tokens=20, temperature=0, stream=stream, **options
    )
    if stream:
        chunks = list(answer)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].choices == []
        usage = chunks[-1].usage
    else:
        assert answer.choices[0].message.content == text and answer.choices[0].finish_reason == "length"
        usage = answer.usage
    assert usage.completion_tokens == len(ids) == 20
    assert usage.prompt_tokens == len(tokenizer(prompt)["input_ids"])


def test_an_adapter_is_a_model(client, directory, adapter):
    from peft import PeftModel

    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), adapter)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("def parse(")["input_ids"]
    expected = tokenizer.decode(written(tuned, ids, 16), skip_special_tokens=True)
    texts = [
        client.completions.create(model=name, prompt="def parse(", max_tokens=16, temperature=0)
        .choices[0]
        .text
        for name in ("tuned", "toy")
    ]
    assert texts[0] == expected != texts[1]


def test_drawn_answers_are_those_of_the_engine(client, directory):
    llm = LLM(directory)
    sampling = Sampling(max_tokens=12, temperature=0.8, top_p=0.9, seed=7, n=3, logit_bias={300: 2.0})
    (expected,) = llm.generate("class Parser", sampling, presence_penalty=0.5, frequency_penalty=0.2)
    answer = client.completions.create(
        model="toy",
        prompt="class Parser",
        max_tokens=12,
        temperature=0.8,
        top_p=0.9,
        seed=7,
        n=3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logit_bias={"300": 2},
    )
    assert [choice.text for choice in answer.choices] == [each.text for each in expected.answers]


def test_a_stop_text_ends_an_answer_and_is_not_part_of_it(client, model, tokenizer):
    text, _ = greedy(model, tokenizer, "def parse(", 40)
    stop = text[20:24]
    for stream in (False, True):
        answer = client.completions.create(
            model="toy", prompt="def parse(", max_tokens=40, temperature=0, stop=[stop], stream=stream
        )
        choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_log_probabilities_of_a_chat_are_those_of_a_forward(client, model, tokenizer):
    answer = client.chat.completions.create(
        model="toy", messages=CHAT, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt)["input_ids"]
    told = answer.choices[0].logprobs.content
    new = written(model, ids, 6)
    with torch.no_grad():
        rows = model(torch.tensor([ids + new])).logits[0].log_softmax(-1)[len(ids) - 1 : -1]
    for row, token, entry in zip(rows, new, told, strict=True):
        assert entry.token == tokenizer.decode([token])
        assert math.isclose(entry.logprob, float(row[token]), abs_tol=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )
    raw = b"".join(bytes(entry.bytes) for entry in told)
    assert raw.decode("utf-8", "replace") == tokenizer.decode(new)


def test_an_echo_scores_the_prompt(client, model, tokenizer):
    ids = tokenizer("def parse(self)")["input_ids"]
    answer = client.completions.create(
        model="toy", prompt="def parse(self)", max_tokens=0, echo=True, logprobs=0, temperature=0
    )
    choice = answer.choices[0]
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(rows[place, token]) for place, token in enumerate(ids[1:])]
    assert choice.text == "def parse(self)" and answer.usage.completion_tokens == 0
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert choice.logprobs.text_offset[1] == len(choice.logprobs.tokens[0])
    streamed = client.completions.create(
        model="toy", prompt="def parse(self)", max_tokens=3, echo=True, logprobs=0, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed).startswith("def parse(self)")


def test_an_answer_has_its_schema(client):
    for form in (
        {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
        {"type": "json_object"},
    ):
        answer = client.chat.completions.create(
            model="toy", messages=CHAT, max_tokens=200, response_format=form, seed=1, temperature=0.5
        )
        if answer.choices[0].finish_reason == "stop":
            value = json.loads(answer.choices[0].message.content)
            assert isinstance(value, dict)
            if form["type"] == "json_schema":
                assert isinstance(value["age"], int) and len(value["name"]) <= 8
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_many_streams_side_by_side_are_each_as_alone(server, model, tokenizer):
    import asyncio

    prompts = [f"def f{number}(" for number in range(24)]

    async def one(client, prompt):
        text = ""
        stream = await client.completions.create(
            model="toy", prompt=prompt, max_tokens=16, temperature=0, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].text
        return text

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == [greedy(model, tokenizer, prompt, 16)[0] for prompt in prompts]
    server.wait_idle()


REFUSED = [
    (openai.BadRequestError, {"temperature": 3}, "temperature"),
    (openai.BadRequestError, {"n": 10**9}, "n"),
    (openai.BadRequestError, {"max_tokens": 10**6}, "max_tokens"),
    (openai.BadRequestError, {"max_tokens": 1899, "messages": CHAT * 40}, "messages"),
    (openai.BadRequestError, {"messages": []}, "messages"),
    (openai.BadRequestError, {"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role"),
    (openai.BadRequestError, {"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    (openai.BadRequestError, {"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
    (openai.BadRequestError, {"logit_bias": {"99999": 1}}, None),
    (openai.BadRequestError, {"tool_choice": "required"}, None),
    (openai.NotFoundError, {"model": "gpt-4"}, "model"),
    (openai.UnprocessableEntityError, {"extra_body": {"regex": "(?=a)b"}}, None),
    (
        openai.UnprocessableEntityError,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "nothing"}},
            }
        },
        None,
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind, change, param", REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_errors_are_those_of_openai(client, kind, change, param, stream):
    with pytest.raises(kind) as raised:
        client.chat.completions.create(
            **{"model": "toy", "messages": CHAT, "max_tokens": 4, "stream": stream} | change
        )
    assert raised.value.param == param and raised.value.type and raised.value.message


ELSEWHERE = {
    "guided_json": ({"type": "object"}, "response_format"),
    "guided_regex": ("a", "regex"),
    "guided_choice": (["a", "b"], "regex"),
    "structured_outputs": ({"regex": "a"}, "regex"),
    "n_predict": (4, "max_tokens"),
    "repeat_penalty": (1.1, "repetition_penalty"),
    "min_tokens": (1, ""),
    "skip_special_tokens": (False, ""),
    "use_beam_search": (True, ""),
    "mirostat": (2, ""),
    "chat_template": ("{{ messages }}", ""),
    "suffix": ("b", "no text is written between"),
    "best_of": (3, "best_of other than n"),
}
"""Published fields of vLLM and llama.cpp, and what the refusal says beside the name."""


@pytest.mark.parametrize("field", ELSEWHERE)
def test_fields_of_other_servers_are_refused_by_name(client, field):
    value, words = ELSEWHERE[field]
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="toy", prompt="a", max_tokens=2, extra_body={field: value})
    assert raised.value.param == field and words in raised.value.message


def test_routes_that_are_not_served_are_told(client):
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client.embeddings.create(model="toy", input="a")
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client.responses.create(model="toy", input="a")


def test_a_template_that_refuses_is_an_error_of_the_request(client):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="toy", messages=[{"role": "assistant", "content": ""}])


def test_a_full_queue_is_told_with_the_time_to_wait(client, server):
    with pytest.raises(openai.RateLimitError) as raised:
        client.completions.create(model="toy", prompt="a", n=65, max_tokens=2)
    assert raised.value.response.headers["retry-after"] == "1"
    server.wait_idle()


def test_tokenize_tells_the_ids_of_prompts_and_chats(server, tokenizer):
    status, body = server.post("/tokenize", {"model": "toy", "prompt": "def parse(self)"})
    assert status == 200 and body["tokens"] == tokenizer("def parse(self)")["input_ids"]
    status, body = server.post("/tokenize", {"messages": CHAT})
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert body["tokens"] == tokenizer(prompt)["input_ids"] and body["count"] == len(body["tokens"])
    assert server.post("/tokenize", {"prompt": "a", "messages": CHAT})[0] == 400


def test_counts_are_told(client, server):
    before = server.metrics()
    client.completions.create(model="toy", prompt="a", max_tokens=5, extra_body={"ignore_eos": True})
    after = server.metrics()
    assert after["cai_tokens_total"] - before["cai_tokens_total"] == 6
    assert after["cai_first_token_seconds_count"] - before["cai_first_token_seconds_count"] == 1
    assert after["cai_requests_total"] - before["cai_requests_total"] == 1
