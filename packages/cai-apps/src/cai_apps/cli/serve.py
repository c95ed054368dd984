"""cai serve RUN|DIR [--port N] [--token-file FILE]"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cai_apps.config.arguments import parse
from cai_apps.config.ranges import COUNT, FILLED, POSITIVE, Range
from cai_apps.config.sections import BaseKind
from cai_apps.serve.options import Limits, ModelSource, ServerOptions
from cai_mesh.errors import ConfigError

NEEDED = ("starlette", "pydantic", "uvicorn", "httptools", "prometheus_client")
"""Modules of the extra `server`."""
TOKEN_VARIABLE = "CAI_SERVE_TOKEN"


@dataclass(frozen=True)
class Arguments:
    """Serve a model over HTTP, in the form of OpenAI's interface, with a page for a chat."""

    directory: Annotated[Path | None, tyro.conf.Positional] = None
    """HF model directory, a folder of peft with an adapter, or a run directory with an export."""
    name: Annotated[str | None, FILLED] = None
    """The model's name for clients; the directory's unless given."""
    model: tuple[str, ...] = ()
    """NAME=DIR of more models, each with processes of its own; adapters too."""
    adapter: Annotated[Path | None, FILLED] = None
    """Folder of peft with an adapter for the model in `directory`."""
    base: BaseKind | None = None
    """What the linear layers of its blocks are kept in: 'nf4' and 'int8' take 4 and 8 bits an element. Default: that of
    the run, or the dtype of the files."""
    chat_template: Annotated[Path | None, FILLED] = None
    """File with a chat template, in place of the tokenizers'."""
    host: Annotated[str, FILLED] = "127.0.0.1"
    """The address to listen at. Others than this machine's own need a token."""
    port: Annotated[int, Range(least=0, most=65535)] = 8000
    """The port; 0 takes one that is free."""
    token: str | None = None
    """What clients have to say (`Authorization: Bearer ...`). Others on this machine see it among the processes: a
    file, or the variable CAI_SERVE_TOKEN, hides it."""
    token_file: Annotated[Path | None, FILLED] = None
    """File with the token."""
    hosts: tuple[str, ...] = ()
    """Names by which clients call the server beside its address, as behind a proxy."""
    replicas: Annotated[int, Range(least=1, most=64)] = 1
    """Copies of each model, each on GPUs of its own. A request goes to the one that has least to do."""
    tensor: Annotated[int, Range(least=1, most=64)] = 1
    """GPUs over which the layers of a copy are cut, for a model that one GPU has no room for. Divides its heads."""
    pipeline: Annotated[int, Range(least=1, most=64)] = 1
    """Stages into which the layers of a copy are divided, each on as many GPUs as --tensor says."""
    memory: Annotated[float | None, POSITIVE] = None
    """GiB of keys and values in each process; 90 % of what is free on a GPU, 1 on the host, unless given."""
    batch_tokens: Annotated[int, COUNT] = 2048
    """The most tokens of a forward."""
    prompt_part: Annotated[int, COUNT] = 256
    """The most tokens of a prompt in a forward in which other answers go on. Fewer let a long prompt disturb others
    less, and take longer itself."""
    requests: Annotated[int, COUNT] = 256
    """The most answers that are computed side by side."""
    queue: Annotated[int, COUNT] = Limits.queue
    """The most answers that are written or wait, of all clients of a model."""
    tokens: Annotated[int, COUNT] = Limits.tokens
    """The most tokens of an answer."""
    answers: Annotated[int, COUNT] = Limits.answers
    """The most answers of a request."""
    body_mib: Annotated[float, Range(above=0, most=1024)] = Limits.body_bytes / 2**20
    """The most MiB of a request's body."""
    connections: Annotated[int, COUNT] = Limits.connections
    """The most open connections."""
    request_seconds: Annotated[float, POSITIVE] = Limits.request_seconds
    """The longest that an answer may take."""
    drain_seconds: Annotated[float, POSITIVE] = Limits.drain_seconds
    """The time that answers under way have when the server is to end."""
    step_seconds: Annotated[float, POSITIVE] = Limits.step_seconds
    """The longest that a step of a model may take before its process is taken for stuck, and the server ends."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="serve")
    _check_installed()
    server = _options(options)
    from cai_apps.serve.lifecycle import serve

    return serve(server)


def _check_installed() -> None:
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"cai serve needs {', '.join(absent)}",
            cause="what a server needs is an extra",
            fix="pip install 'cai-apps[server]'",
        )


def _options(arguments: Arguments) -> ServerOptions:
    """Return what is served; raise ConfigError for what cannot be, before anything is read."""
    limits = Limits(
        body_bytes=int(arguments.body_mib * 2**20),
        tokens=arguments.tokens,
        answers=arguments.answers,
        queue=arguments.queue,
        connections=arguments.connections,
        request_seconds=arguments.request_seconds,
        drain_seconds=arguments.drain_seconds,
        step_seconds=arguments.step_seconds,
    )
    return ServerOptions(
        models=_models(arguments),
        host=arguments.host,
        port=arguments.port,
        token=_token(arguments),
        hosts=arguments.hosts,
        replicas=arguments.replicas,
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        memory=arguments.memory,
        batch_tokens=arguments.batch_tokens,
        prompt_part=arguments.prompt_part,
        requests=arguments.requests,
        limits=limits,
    )


def _models(arguments: Arguments) -> tuple[ModelSource, ...]:
    models = []
    if arguments.directory is not None:
        directory = arguments.directory
        name = arguments.name or (directory.absolute().name or "model")
        models.append(
            ModelSource(name, directory, arguments.adapter, arguments.base, arguments.chat_template)
        )
    elif arguments.adapter is not None or arguments.name is not None or arguments.base is not None:
        raise ConfigError(
            "there is no model that --adapter, --name or --base speak of",
            fix="cai serve DIR --adapter FOLDER",
        )
    for pair in arguments.model:
        name, mark, place = pair.partition("=")
        if not mark or not place:
            raise ConfigError("--model names no directory", got=pair[:200], expected="--model NAME=DIR")
        models.append(ModelSource(name, Path(place).expanduser(), chat_template=arguments.chat_template))
    if not models:
        raise ConfigError("cai serve needs a model", expected="cai serve RUN|DIR", fix="or --model NAME=DIR")
    for model in models:
        if not model.directory.is_dir():
            raise ConfigError(
                f"no directory {model.directory}", expected="a run, an export or an HF directory"
            )
    return tuple(models)


def _token(arguments: Arguments) -> str | None:
    """Return the token of the command line, of a file or of the environment; None: there is none."""
    if arguments.token is not None and arguments.token_file is not None:
        raise ConfigError("there is one token", got="--token and --token-file", fix="give one of them")
    if arguments.token_file is not None:
        try:
            return arguments.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{arguments.token_file} cannot be read", cause=str(error)) from None
    return arguments.token if arguments.token is not None else os.environ.get(TOKEN_VARIABLE)
