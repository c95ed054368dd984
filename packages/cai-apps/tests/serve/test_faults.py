"""Clients that go, read slowly, send half of a body or far too much: all are answered, and nothing is left of them."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time

import pytest
from serving import Server, read_events

LONG = {"model": "toy", "prompt": "def parse(", "max_tokens": 1800, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    """After each test: no block is held, nothing is written, and health answers within a second."""
    yield
    status, seconds = server.health()
    assert status == 200 and seconds < 1
    server.wait_idle()
    assert server.post("/v1/completions", {"model": "toy", "prompt": "a", "max_tokens": 2})[0] == 200


def reset(connection: socket.socket) -> None:
    """Close a connection as a process that dies does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_frees_its_blocks(server: Server, is_stream):
    """At ten random instants: before the first token, and in the midst of the answer."""
    draw = random.Random(3)
    for number in range(10):
        if is_stream:
            connection = server.open_stream(LONG | {"n": 1 + number % 2})
        else:
            content = json.dumps(LONG).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
            )
            connection = socket.create_connection(("127.0.0.1", server.port), 60)
            connection.sendall(head.encode() + content)
        time.sleep(draw.random() * 0.3)
        if is_stream and number % 2:
            read_events(connection, b"data: ")
        (reset if number % 3 else socket.socket.close)(connection)
    server.wait_idle()


def test_a_slow_reader_holds_up_nobody(server: Server):
    slow = [server.open_stream(LONG) for _ in range(3)]
    began = time.monotonic()
    status, _ = server.post("/v1/completions", {"model": "toy", "prompt": "a", "max_tokens": 8})
    assert status == 200 and time.monotonic() - began < 10
    assert server.health()[1] < 1
    for connection in slow:
        assert b"data: " in read_events(connection, b"data: ")
        reset(connection)


def raw(server: Server, content: bytes, seconds: float = 30) -> bytes:
    """What the server answers to some bytes."""
    with socket.create_connection(("127.0.0.1", server.port), seconds) as connection:
        connection.sendall(content)
        return read_events(connection, b"\r\n\r\n", seconds)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def test_a_body_that_is_too_long_is_refused(server: Server):
    """By its length, and as it comes in chunks; the published client's error is 413."""
    assert b" 413 " in raw(server, HEAD + b"Content-Length: 1000000000\r\n\r\n{")
    assert server.request("POST", "/v1/completions", b" " * (2**20 + 1))[0] == 413
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        try:
            for _ in range(100):
                connection.sendall(chunk)
        except OSError:
            pass
        assert b" 413 " in read_events(connection, b"\r\n\r\n")


def test_half_a_body_and_then_the_end(server: Server):
    for content in (b'{"model": "toy", ', b""):
        with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
            connection.sendall(HEAD + b"Content-Length: 200\r\n\r\n" + content)
            connection.shutdown(socket.SHUT_WR)
            assert b" 200 " not in read_events(connection, b"\r\n\r\n")
    assert server.health()[0] == 200 and server.health()[1] < 1
    server.wait_idle()


def test_what_is_no_request_is_refused(server: Server):
    for content in (
        b"\0" * 100,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\xff\xfe\r\n\r\n",
        b"a" * 200_000,
    ):
        answer = raw(server, content + b"\r\n\r\n")
        assert b" 400 " in answer or answer == b"" or b" 505 " in answer
    endless = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"x: " + b"a" * 100_000
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        try:
            for _ in range(50):
                connection.sendall(endless)
                time.sleep(0.01)
        except OSError:
            return
    raise AssertionError("headers have no end")


def test_an_offer_of_another_protocol_is_not_taken(server: Server):
    """Java's client and `curl --http2` offer h2c with each request, and its body follows in HTTP/1.1."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    body = b'{"model": "toy", "prompt": "\\r\\n\\r\\nUpgrade: a", "max_tokens": 2}'
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = HEAD + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body
        name = request.index(b"\r\nUpgrade: h2c")
        for cut in (0, name + 1, name + 2, name + 5, name + 9, len(request) - len(body) - 2):  # two packets
            connection.sendall(request[:cut])
            time.sleep(0.05 if cut else 0)
            connection.sendall(request[cut:])
            answer = read_events(connection, b'"usage"')
            assert answer.startswith(b"HTTP/1.1 200 "), (cut, answer)


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_many_opens_close_the_oldest_that_ask_for_nothing(server: Server):
    stream = server.open_stream(LONG | {"max_tokens": 100})
    read_events(stream, b"data: ")
    connections = []
    try:
        for _ in range(1000):  # the server has 200
            connections.append(socket.create_connection(("127.0.0.1", server.port), 10))
        for _ in range(5):
            assert server.health() < (201, 1.0)
        assert b"[DONE]" in read_events(stream, b"[DONE]")
        assert sum(map(is_closed, connections)) >= 800
    finally:
        for connection in (*connections, stream):
            connection.close()


BODIES = {
    "NUL and others": (200, {"prompt": "a\0b\x1b\x7f\u2028\ud7ff\U0010ffff"}),
    "a surrogate": (400, b'{"model": "toy", "prompt": "\\ud800"}'),
    "no UTF-8": (400, b'{"model": "toy", "prompt": "\xff"}'),
    "no JSON": (400, b"{'model': 1}"),
    "nothing": (400, b""),
    "a list": (400, b"[]"),
    "deep": (400, b'{"model":' + b"[" * 100_000),
    "a number without end": (400, b'{"model": "toy", "prompt": "a", "seed": ' + b"9" * 100_000 + b"}"),
    "no number": (400, b'{"model": "toy", "prompt": "a", "temperature": NaN}'),
    "n": (400, {"n": 10**9}),
    "tokens": (400, {"max_tokens": 10**9}),
    "a truth for a number": (400, {"max_tokens": True}),
    "ids that are none": (400, {"prompt": [5, 10**6]}),
    "negative ids": (400, {"prompt": [-1]}),
    "no prompt": (400, {"prompt": []}),
    "an empty prompt": (400, {"prompt": [[]]}),
    "a schema of 1,000 levels": (400, None),
    "a schema of 80 levels": (422, None),
    "a schema that is elsewhere": (422, {"$ref": "http://127.0.0.1:9/schema.json"}),
    "a schema of a file": (422, {"$ref": "file:///etc/passwd"}),
    "a regex that repeats itself": (200, {"regex": "(a+)+b"}),
    "a regex of powers": (None, {"regex": "((a{1,1000}){1,1000}){1,1000}"}),
    "a regex with a long memory": (200, {"regex": ".*a.{200}b.*"}),
    "a grammar without end": (422, {"grammar": "start: start"}),
}


def nested(levels: int) -> bytes:
    """A body with a schema of so many levels, which Python's own writer of JSON could not write."""
    schema = '{"type":"object","properties":{"a":' * levels + "{}" + "}}" * levels
    form = f'{{"type":"json_schema","json_schema":{{"name":"a","schema":{schema}}}}}'
    return f'{{"model":"toy","prompt":"a","max_tokens":4,"response_format":{form}}}'.encode()


@pytest.mark.parametrize("case", BODIES)
def test_bodies_that_mean_harm_are_answered(server: Server, case):
    expected, change = BODIES[case]
    if change is None:
        body = nested(1000 if expected == 400 else 80)
    elif isinstance(change, bytes):
        body = change
    elif "$ref" in change:
        schema = {"name": "a", "schema": change}
        body = {
            "model": "toy",
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
    else:
        body = {"model": "toy", "prompt": "a", "max_tokens": 8} | change
    slowest = [0.0]
    done = threading.Event()

    def watch():
        while not done.wait(0.02):
            slowest[0] = max(slowest[0], server.health()[1])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        status, answer = server.post("/v1/completions", body)
    finally:
        done.set()
        watcher.join()
    assert status == expected or (expected is None and status in (200, 422)), answer
    assert status == 200 or answer["error"]["message"]
    assert slowest[0] < 1


def test_forms_that_take_long_hold_up_nobody(server: Server):
    """5,000 optional properties take seconds to compile, and then more than llguidance follows."""
    properties = {f"k{number}": {"type": "string"} for number in range(5000)}
    schema = {"name": "a", "schema": {"type": "object", "properties": properties}}
    body = {"model": "toy", "prompt": "a", "response_format": {"type": "json_schema", "json_schema": schema}}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    stream = server.open_stream(LONG | {"max_tokens": 200})
    thread.start()
    while thread.is_alive():
        assert server.health()[1] < 1
        time.sleep(0.05)
    assert answers[0][0] == 422 and "form" in answers[0][1]["error"]["message"]
    assert b'data: {"error"' not in read_events(stream, b"[DONE]")  # nor has anybody else lost anything
    stream.close()


@pytest.mark.matrix
def test_24_000_requests_that_come_and_go_leave_nothing(server: Server):
    """Some are read to their end, some are left after a while, some at once."""
    draw = random.Random(5)
    server.wait_idle()
    left = [24_000]
    lock = threading.Lock()

    def ask():
        own = random.Random(draw.random())
        while True:
            with lock:
                if not left[0]:
                    return
                left[0] -= 1
            connection = server.open_stream(
                {"model": "toy", "prompt": "a" * own.randrange(1, 60), "max_tokens": own.randrange(1, 12)}
            )
            kind = own.random()
            if kind < 0.7:
                read_events(connection)
            elif kind < 0.9:
                read_events(connection, b"data: ")
            reset(connection)

    threads = [threading.Thread(target=ask) for _ in range(32)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert server.health()[1] < 1
        time.sleep(0.5)
    server.wait_idle()
