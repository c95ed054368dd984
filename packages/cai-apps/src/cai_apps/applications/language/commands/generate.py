"""cai generate DIR [--adapter DIR] --prompt TEXT | --prompts FILE | --chat"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from cai_apps.config.arguments import parse
from cai_apps.config.ranges import COUNT, FILLED, NATURAL, SEED, Range
from cai_apps.config.sections import BaseKind
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from cai_apps.engine import Sampling


@dataclass(frozen=True)
class Arguments:
    """Continue a prompt or a file of prompts, or chat, with an exported model."""

    directory: Annotated[Path, tyro.conf.Positional]
    """HF model directory, a folder of peft with an adapter, or a run directory with an export."""
    adapter: Annotated[Path | None, FILLED] = None
    """Folder of peft with an adapter for the model."""
    base: BaseKind | None = None
    """What the linear layers of the model's blocks are kept in: 'nf4' and 'int8' take 4 and 8 bits an element. Default:
    that of the run, or the dtype of the files."""
    prompt: str | None = None
    """A text to go on with; 'def ' unless given."""
    prompts: Annotated[Path | None, FILLED] = None
    """A file of prompts, which are computed side by side: a text a line, or with the ending .jsonl a record a line,
    {"prompt": "..."} or a conversation whose next answer is wanted, in any form that training reads."""
    output: Annotated[Path | None, FILLED] = None
    """File of JSON lines for the answers to `prompts`, in their order; the terminal unless given."""
    resume: bool = False
    """Go on with an output that an earlier command of the same options has begun."""
    chat: bool = False
    """The prompt is a user's message: it is written by the model's chat template, and the answer alone is printed.
    Without a prompt, a chat in the terminal."""
    system: str | None = None
    """The system's message, before the user's first one."""
    chat_template: Annotated[Path | None, FILLED] = None
    """File with a chat template, in place of the tokenizer's."""
    tokens: Annotated[int, COUNT] = 64
    """Length of the continuation at most."""
    temperature: Annotated[float, NATURAL] = 0.8
    """0: always the likeliest token."""
    top_k: Annotated[int, Range(least=0)] = 0
    """So many of the likeliest tokens may be chosen; 0: all."""
    top_p: Annotated[float, Range(least=0, most=1)] = 1.0
    """The likeliest tokens that hold this probability together may be chosen."""
    min_p: Annotated[float, Range(least=0, most=1)] = 0.0
    """Tokens of this share of the largest probability, or more, may be chosen."""
    repetition_penalty: Annotated[float, Range(above=0)] = 1.0
    """Divides the logits of tokens that are there already."""
    stop: tuple[str, ...] = ()
    """Texts at which an answer ends."""
    json_schema: Annotated[Path | None, FILLED] = None
    """File with a JSON schema: answers are JSON of it (cai-apps[grammar])."""
    regex: Annotated[str | None, FILLED] = None
    """Regular expression that answers match as a whole (cai-apps[grammar])."""
    seed: Annotated[int, SEED] = 0
    special_tokens: Literal["text", "parse"] = "text"
    """Control tokens written in the prompt, such as </s>: 'text' like any other, or 'parse' them."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="generate")
    _check(options)
    from cai_apps.applications.language.generate import Writer, exported, generate, place_of

    directory, base = exported(options.directory, options.base)
    sampling = _sampling(options)
    if options.prompt is not None or (options.prompts is None and not options.chat):
        print(
            generate(
                directory,
                "def " if options.prompt is None else options.prompt,
                sampling,
                adapter=options.adapter,
                special_tokens=options.special_tokens,
                chat=options.chat,
                system=options.system,
                chat_template=options.chat_template,
                base=base,
            )
        )
        return 0
    from cai_apps.applications.language.conversing import converse
    from cai_apps.applications.language.prompt_files import answer_file

    place = place_of(directory, options.adapter, base=base)
    if options.prompts is not None:
        answer_file(
            place,
            options.prompts,
            options.output,
            sampling,
            options.special_tokens,
            options.chat_template,
            resumes=options.resume,
        )
    else:
        converse(Writer.of(place), sampling, system=options.system, chat_template=options.chat_template)
    return 0


def _sampling(options: Arguments) -> Sampling:
    from cai_apps.engine import Sampling

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "seed")
    schema = None if options.json_schema is None else options.json_schema.read_text(encoding="utf-8")
    numbers = {name: getattr(options, name) for name in names}
    return Sampling(max_tokens=options.tokens, json_schema=schema, regex=options.regex, **numbers)


def _check(options: Arguments) -> None:
    """Refuse options that do not go together."""
    if options.prompts is not None and (options.prompt is not None or options.chat or options.system):
        raise ConfigError(
            "prompts of a file have none beside them",
            got="--prompts with --prompt, --chat or --system",
            fix="write conversations into the file, system's messages too, or leave --prompts out",
        )
    if options.output is not None and options.prompts is None:
        raise ConfigError(
            "an output is for the prompts of a file", got=f"--output {options.output}", fix="--prompts FILE"
        )
    if options.resume and options.output is None:
        raise ConfigError("an output is what a command goes on with", got="--resume", fix="--output FILE")
    if options.output is not None and options.output.exists() and not options.resume:
        raise ConfigError(
            f"{options.output} is there already",
            fix="--resume goes on with it, or name another output, or move it away",
        )
    if options.json_schema is not None and not options.json_schema.is_file():
        raise ConfigError(f"no file {options.json_schema}", expected="a file with a JSON schema")
    if options.system is not None and not options.chat:
        raise ConfigError(
            "a system's message is part of a chat", got="--system without --chat", fix="add --chat"
        )
