"""A small model in a directory, and `cai serve` over it in a process of its own."""

from __future__ import annotations

import argparse
import http.client
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from chat_templates import QWEN
from transformers import AutoConfig, AutoModelForCausalLM

from cai_apps.data.tokenizer import train_tokenizer

START_SECONDS = 120


def save_model(directory: Path, *, positions: int = 2048, broken_token: int | None = None) -> Path:
    """A random LLaMA and a tokenizer of the standard library's text, with Qwen's chat template.

    Args:
        positions: positions of the model.
        broken_token: an id whose embedding is no number.
    """
    texts = (inspect.getsource(module) for module in (argparse, inspect))
    tokenizer = train_tokenizer(texts, 1024, ("<|im_start|>", "<|im_end|>"))
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", QWEN.template
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=positions,
        bos_token_id=0,
        pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config).float()
    if broken_token is not None:
        with torch.no_grad():
            model.model.embed_tokens.weight[broken_token] = torch.nan
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


class Server:
    """A server in another process; `ready` waits for it.

    Args:
        arguments: those of `cai serve`, without a port.
        token: what it asks for.
    """

    def __init__(self, *arguments: object, token: str | None = None):
        self.token = token
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the server
        command = [sys.executable, "-m", "cai_apps", "serve", *map(str, arguments), "--port", "0"]
        environment = os.environ | ({"CAI_SERVE_TOKEN": token} if token else {})
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, env=environment, text=True
        )
        self._port: int | None = None

    @property
    def port(self) -> int:
        if self._port is None:
            line = self.process.stdout.readline()
            match = re.search(r":(\d+)$", line)
            assert match, (line, self.errors())
            self._port = int(match[1])
        return self._port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode()

    def workers(self) -> list[int]:
        """The processes that have models."""
        return [worker for child in children_of(self.process.pid) for worker in children_of(child)]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """Signal twice, which ends it whatever is under way; return its exit code."""
        try:
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            self.process.send_signal(signal.SIGTERM)
            return self.process.wait(20)
        finally:
            self.process.kill()

    # --- requests, as plain as they can be

    def request(
        self, method: str, path: str, body: object = None, headers: dict | None = None, timeout: float = 60
    ):
        """The status, headers and body of an answer. A body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = dict(headers or {})
        if self.token is not None:
            given.setdefault("Authorization", f"Bearer {self.token}")
        given = {name: value for name, value in given.items() if value is not None}
        try:
            connection.request(method, path, content, given)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: object, **options):
        status, _, content = self.request("POST", path, body, **options)
        return status, json.loads(content)

    def open_stream(self, body: dict, path: str = "/v1/completions") -> socket.socket:
        """A connection whose answer is a stream that nobody has read."""
        content = json.dumps(body | {"stream": True}).encode()
        token = f"Authorization: Bearer {self.token}\r\n" if self.token else ""
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{token}Content-Length: {len(content)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), 60)
        connection.sendall(head.encode() + content)
        return connection

    def health(self) -> tuple[int, float]:
        """The status of health, and the seconds that it took."""
        began = time.monotonic()
        status = self.request("GET", "/health", timeout=10)[0]
        return status, time.monotonic() - began

    def metrics(self) -> dict[str, float]:
        """Counts by name, without labels but for the first model's."""
        text = self.request("GET", "/metrics")[2].decode()
        rows = re.findall(r"^(\w+)(?:\{(.*?)\})? (\S+)$", text, re.M)
        counts: dict[str, float] = {}
        for name, _, value in rows:
            counts[name] = counts.get(name, 0.0) + float(value)
        return counts

    def wait_idle(self, seconds: float = 20) -> None:
        """Wait until no block is held, and nothing is written or waits."""
        deadline = time.monotonic() + seconds
        while True:
            counts = self.metrics()
            busy = counts["cai_answers_running"] + counts["cai_answers_waiting"] + counts["cai_requests_open"]
            if not busy and counts["cai_blocks_free"] == counts["cai_blocks"]:
                return
            assert time.monotonic() < deadline, counts
            time.sleep(0.1)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_nothing_is_left(server: Server, workers: list[int], code: int) -> None:
    """Assert that a server has ended with an exit code, and so have its workers, and that nobody listens."""
    assert server.process.wait(20) == code, server.errors()
    deadline = time.monotonic() + 5
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with socket.socket() as connection:
        assert connection.connect_ex(("127.0.0.1", server.port))
    assert "Traceback" not in server.errors() and "ASGI" not in server.errors(), server.errors()


def read_events(connection: socket.socket, until: bytes = b"0\r\n\r\n", seconds: float = 60) -> bytes:
    """What a connection says until a text comes, or its end."""
    connection.settimeout(seconds)
    content = b""
    while until not in content:
        part = connection.recv(65536)
        if not part:
            break
        content += part
    return content
