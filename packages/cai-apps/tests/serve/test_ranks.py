"""A model over several ranks behind the server: one process's answers, and the end of all where one of them ends."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest
from serving import Server, assert_nothing_is_left, is_alive, read_events
from transformers import AutoModelForCausalLM, AutoTokenizer

from cai_apps.engine import LLM, EngineOptions

PROMPTS = ("def parse(", "class Argument", "import " * 40, "a")
LONG = {"model": "toy", "prompt": "def parse(", "max_tokens": 1800, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(directory):
    """Greedy and seeded answers of a plain `LLM.generate` in this process."""
    llm = LLM(
        AutoModelForCausalLM.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
        options=EngineOptions(memory=0.02),
    )
    options = [{"temperature": 0}, {"temperature": 0.9, "seed": 5}]
    return [
        [list(output.token_ids) for output in llm.generate(PROMPTS, max_tokens=24, **each)]
        for each in options
    ]


def answered(server: Server, **options) -> list[str]:
    """The texts of the answers to all prompts, asked for in one request."""
    body = {"model": "toy", "prompt": list(PROMPTS), "max_tokens": 24, **options}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return [choice["text"] for choice in answer["choices"]]


def assert_answers(server: Server, expected, directory) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for options, ids in zip(({"temperature": 0}, {"temperature": 0.9, "seed": 5}), expected, strict=True):
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in ids]
        assert answered(server, **options) == texts
        assert answered(server, **options) == texts  # from blocks that are shared now


def test_two_tensor_ranks_answer_as_one_process_does(directory, expected):
    """Plain, streamed, held to forms, cancelled; then a signal in the midst of a stream, and a second one."""
    server = Server(directory, "--tensor", 2, "--memory", 0.02, "--drain-seconds", 60)
    assert_answers(server, expected, directory)
    workers = server.workers()
    assert len(workers) == 2
    with server.open_stream(LONG | {"max_tokens": 24, "temperature": 0, "ignore_eos": False}) as stream:
        events = [line[6:] for line in read_events(stream, b"[DONE]").splitlines() if b'"text"' in line]
    streamed = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert streamed == answered(server, temperature=0)[0]
    status, answer = server.post("/v1/completions", LONG | {"regex": "[a-f]{3,9}", "max_tokens": 20})
    assert status == 200 and {*answer["choices"][0]["text"]} <= {*"abcdef"}
    status, answer = server.post("/v1/completions", LONG | {"grammar": "start: start"})
    assert status == 422, answer
    gone = server.open_stream(LONG | {"n": 2})
    read_events(gone, b"data: ")
    gone.close()
    server.wait_idle()
    with server.open_stream(LONG) as stream:
        read_events(stream, b"data: ")
        server.signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while server.health()[0] != 503:
            assert time.monotonic() < deadline
        assert server.post("/v1/completions", LONG)[0] == 503
        read_events(stream, b"data: ")
        server.signal(signal.SIGTERM)
        assert_nothing_is_left(server, workers, 0)


@pytest.mark.matrix
@pytest.mark.parametrize("degrees", [(4, 1), (1, 2), (2, 2)])
def test_more_ranks_and_stages_answer_as_one_process_does(directory, expected, degrees):
    tensor, pipeline = degrees
    server = Server(directory, "--tensor", tensor, "--pipeline", pipeline, "--memory", 0.02)
    assert_answers(server, expected, directory)
    workers = server.workers()
    assert len(workers) == tensor * pipeline
    assert_nothing_is_left(server, workers, server.stop())


@pytest.mark.matrix
def test_an_adapter_over_two_ranks_answers_as_on_one(adapter, directory):
    texts = []
    for degree in (1, 2):
        server = Server(adapter, "--name", "toy", "--tensor", degree, "--memory", 0.02)
        texts.append(answered(server, temperature=0))
        workers = server.workers()
        assert_nothing_is_left(server, workers, server.stop())
    assert texts[0] == texts[1]


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stuck"])
@pytest.mark.parametrize("instant", range(10))
def test_a_rank_that_dies_or_is_stuck_is_told_and_ends_the_server(directory, number, instant):
    """Either rank, in the midst of answers: an event in each stream, 503, the end within ten seconds."""
    draw = random.Random(instant)
    server = Server(directory, "--tensor", 2, "--memory", 0.02)
    streams = [server.open_stream(LONG | {"n": 1 + instant % 2}) for _ in range(3)]
    for stream in streams:
        read_events(stream, b"data: ")
    workers = server.workers()
    time.sleep(draw.random() * 0.5)
    began = time.monotonic()
    os.kill(workers[draw.randrange(2)], number)
    for stream in streams:
        rest = read_events(stream, b"worker_failed", seconds=10)
        assert b'data: {"error":{' in rest and b"[DONE]" not in rest
    status, seconds = server.health()
    assert status == 503 and seconds < 1
    assert server.post("/v1/completions", LONG)[0] == 503
    assert_nothing_is_left(server, workers, 1)
    assert time.monotonic() - began < 10
    assert "the process of a model has ended" in server.errors()


@pytest.mark.matrix
def test_ranks_end_with_a_server_that_is_killed(directory):
    server = Server(directory, "--tensor", 2, "--memory", 0.02)
    stream = server.open_stream(LONG)
    read_events(stream, b"data: ")
    workers = server.workers()
    server.signal(signal.SIGKILL)
    server.process.wait(10)
    deadline = time.monotonic() + 10
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
