"""What is served, where, to whom, and how much of it: checked before anything is read."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from cai_apps.config.sections import BaseKind
from cai_mesh.errors import ConfigError

TOKEN = re.compile(r"[!-~]+")
"""Letters of a token: those that a header can hold, without white space."""
PROCESSES = 64
"""The most processes of all models."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
"""A model's name as clients say it."""


@dataclass(frozen=True)
class Limits:
    """The most that a client may ask for, and the longest that it may take.

    Args:
        body_bytes: bytes of a body.
        tokens: tokens of an answer.
        answers: answers of a request: `n`, times its prompts.
        bias_entries: entries of `logit_bias`.
        stop_texts: texts at which an answer ends.
        tools: tools of a request.
        queue: answers that are written or wait, of all clients of a model.
        unread_tokens: tokens that wait for a client that reads slowly; past these its request ends.
        unread_seconds: seconds that a connection may be full before it is closed.
        connections: open connections; past these the oldest one that asks for nothing is closed.
        head_bytes: bytes of a request's line and headers.
        head_seconds: seconds until a request's headers are there.
        body_seconds: seconds until its body is there.
        request_seconds: seconds from the body to the last byte of an answer.
        drain_seconds: seconds that answers under way have when the server is to end.
        step_seconds: seconds after which a step of a model that does not end is taken for stuck.
    """

    body_bytes: int = 8 * 2**20
    tokens: int = 32768
    answers: int = 128
    bias_entries: int = 300
    stop_texts: int = 16
    tools: int = 128
    queue: int = 1024
    unread_tokens: int = 8192
    unread_seconds: float = 60.0
    connections: int = 4096
    head_bytes: int = 65536
    head_seconds: float = 15.0
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
    step_seconds: float = 120.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            if not 0 < getattr(self, entry.name) < 2**40:
                raise ConfigError(
                    f"{entry.name} is out of range", got=getattr(self, entry.name), expected="more than 0"
                )


@dataclass(frozen=True)
class ModelSource:
    """A model and the name by which clients ask for it.

    Args:
        name: the name.
        directory: an export, another HF model directory, a folder of peft with an adapter, or a run with one of these.
        adapter: a folder of peft with an adapter for the model.
        base: the form of the linear layers of its blocks; None: that of the run, or the dtype of the files.
        chat_template: a file with a chat template; None: the tokenizer's.
    """

    name: str
    directory: Path
    adapter: Path | None = None
    base: BaseKind | None = None
    chat_template: Path | None = None

    def __post_init__(self) -> None:
        if NAME.fullmatch(self.name) is None:
            raise ConfigError(
                "a model's name is none that clients can ask for",
                got=ascii(self.name)[:140],
                expected="letters, digits and . _ : / -, 128 at most",
                fix="--model NAME=DIR",
            )


@dataclass(frozen=True)
class ServerOptions:
    """What is served and where.

    Args:
        models: the models; the first one is meant where a client names none.
        host: the address to listen at.
        port: its port; 0: one that is free.
        token: the word that clients must say; None: nothing, which only an address of this machine alone allows.
        hosts: names by which clients may call the server beside its address, as behind a proxy.
        replicas: copies of each model, each with GPUs of its own.
        tensor: GPUs over which the layers of a copy are cut.
        pipeline: stages into which its layers are divided, each on as many GPUs.
        memory: GiB of keys and values in each process; None: as much as the engine takes by itself.
        batch_tokens: the most tokens of a forward.
        prompt_part: the most tokens of a prompt in a forward in which other answers go on.
        requests: the most answers that are computed side by side.
        limits: the most that clients may ask for.
    """

    models: tuple[ModelSource, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()
    replicas: int = 1
    tensor: int = 1
    pipeline: int = 1
    memory: float | None = None
    batch_tokens: int = 2048
    prompt_part: int = 256
    requests: int = 256
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not names or len({*names}) < len(names):
            raise ConfigError(
                "models have one name each", got=", ".join(names) or "no model", fix="--model NAME=DIR"
            )
        if not 0 <= self.port < 2**16:
            raise ConfigError("the port is out of range", got=self.port, expected="0 to 65535")
        for name in ("replicas", "tensor", "pipeline"):
            if not 1 <= getattr(self, name) <= PROCESSES:
                raise ConfigError(
                    f"{name} is out of range", got=getattr(self, name), expected=f"1 to {PROCESSES}"
                )
        if self.ranks * self.replicas * len(names) > PROCESSES:
            raise ConfigError(
                "there would be too many processes",
                got=f"{len(names)} models x {self.replicas} replicas x {self.ranks} ranks",
                expected=f"{PROCESSES} at most",
                fix="--replicas, --tensor or --pipeline of less",
            )
        if self.token is not None and TOKEN.fullmatch(self.token) is None:
            raise ConfigError(
                "the token is none that a header can hold",
                got="nothing" if not self.token.strip() else "white space or letters that are not ASCII",
                expected="letters, digits and signs",
                fix="python -c 'import secrets; print(secrets.token_urlsafe())' makes one",
            )
        if self.token is None and not self.is_local:
            raise ConfigError(
                "others could reach the server, and nobody has to say a token",
                got=f"--host {self.host}",
                expected="127.0.0.1, ::1 or localhost without a token",
                fix="--token-file FILE, or leave --host out and put a proxy before it",
            )

    @property
    def ranks(self) -> int:
        """Processes that compute one copy of a model together."""
        return self.tensor * self.pipeline

    @property
    def is_local(self) -> bool:
        """Whether the server listens to this machine alone."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether an address, or a name of one, is this machine's own."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
