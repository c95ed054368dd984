"""cai generate DIR [--adapter DIR] --prompt TEXT"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from cai_apps.config import file as config_file
from cai_apps.config.arguments import parse
from cai_apps.config.ranges import COUNT, FILLED, NATURAL, SEED
from cai_apps.config.sections import BaseKind
from cai_apps.run.files.directory import RunDirectory


@dataclass(frozen=True)
class Arguments:
    """Continue a prompt, or answer a message, with an exported model."""

    directory: Annotated[Path, tyro.conf.Positional]
    """HF model directory, a folder of peft with an adapter, or a run directory with an export."""
    adapter: Annotated[Path | None, FILLED] = None
    """Folder of peft with an adapter for the model."""
    base: BaseKind | None = None
    """What the linear layers of the model's blocks are kept in: 'nf4' and 'int8' take 4 and 8 bits an element. Default:
    that of the run, or the dtype of the files."""
    prompt: str = "def "
    chat: bool = False
    """The prompt is a user's message: it is written by the model's chat template, and the answer alone is printed."""
    tokens: Annotated[int, COUNT] = 64
    """Length of the continuation."""
    temperature: Annotated[float, NATURAL] = 0.8
    """0: always the likeliest token."""
    seed: Annotated[int, SEED] = 0
    special_tokens: Literal["text", "parse"] = "text"
    """Control tokens written in the prompt, such as </s>: 'text' like any other, or 'parse' them."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="generate")
    from cai_apps.applications.language.generate import Drawing, generate

    run_directory, base = RunDirectory(options.directory), options.base
    directory = options.directory
    if run_directory.config_file.is_file():
        directory = run_directory.export
        base = base or config_file.parse(run_directory.config_file).get("lora", {}).get("base")
    drawing = Drawing(options.tokens, options.temperature, options.seed)
    how = {"special_tokens": options.special_tokens, "chat": options.chat, "base": base or "compute"}
    print(generate(directory, options.prompt, drawing, adapter=options.adapter, **how))
    return 0
