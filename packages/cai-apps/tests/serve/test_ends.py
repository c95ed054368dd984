"""How a server ends: it drains, or is told twice, or a process of it dies. Nothing is left of it."""

from __future__ import annotations

import os
import signal
import time

import pytest
from serving import Server, assert_nothing_is_left, read_events, save_model

BROKEN = 301
LONG = {
    "model": "toy",
    "prompt": "def parse(",
    "max_tokens": 30000,
    "ignore_eos": True,
    "logit_bias": {str(BROKEN): -100},  # it is asked for by who means it
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A model with a long context, which predicts what is no number after one of its tokens."""
    return save_model(tmp_path_factory.mktemp("broken") / "toy", positions=32768, broken_token=BROKEN)


def test_sigterm_lets_streams_end_takes_no_new_work_and_tells_those_that_take_longer(broken):
    server = Server(broken, "--drain-seconds", 15)
    short, long = server.open_stream(LONG | {"max_tokens": 10}), server.open_stream(LONG)
    read_events(long, b"data: ")
    workers = server.workers()
    server.signal(signal.SIGTERM)
    deadline = time.monotonic() + 10
    while server.health()[0] != 503:
        assert time.monotonic() < deadline
    status, answer = server.post("/v1/completions", {"model": "toy", "prompt": "a"})
    assert status == 503 and answer["error"]["code"] == "draining"
    assert server.request("GET", "/v1/models")[0] == 200
    rest = read_events(short)
    assert b"[DONE]" in rest and b'data: {"error"' not in rest
    rest = read_events(long)
    assert b'"server_ended"' in rest and b"[DONE]" not in rest
    assert_nothing_is_left(server, workers, 0)


@pytest.mark.parametrize("kind", ["killed", pytest.param("raises", marks=pytest.mark.matrix)])
def test_a_process_of_a_model_that_dies_is_told_and_ends_the_server(broken, kind):
    """An event of an error in each stream, 503, and the end within ten seconds."""
    server = Server(broken)
    streams = [server.open_stream(LONG) for _ in range(3)]
    for stream in streams:
        read_events(stream, b"data: ")
    workers = server.workers()
    began = time.monotonic()
    if kind == "killed":
        os.kill(workers[0], signal.SIGKILL)
    else:
        status, answer = server.post("/v1/completions", {"model": "toy", "prompt": [BROKEN]})
        assert status == 503 and answer["error"]["code"] == "worker_failed"
    for stream in streams:
        rest = read_events(stream, b"worker_failed", seconds=10)
        assert b'data: {"error":{' in rest and b"[DONE]" not in rest
    assert server.health()[0] == 503
    assert server.post("/v1/completions", {"model": "toy", "prompt": "a"})[0] == 503
    assert_nothing_is_left(server, workers, 1)
    assert time.monotonic() - began < 10
    assert "the process of a model has ended" in server.errors()


@pytest.mark.matrix
def test_workers_end_with_a_server_that_is_killed(broken):
    server = Server(broken, "--replicas", 2)
    stream = server.open_stream(LONG)
    read_events(stream, b"data: ")
    workers = server.workers()
    assert len(workers) == 2
    server.signal(signal.SIGKILL)
    assert_nothing_is_left(server, workers, -signal.SIGKILL)
