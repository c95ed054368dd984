"""cai generate DIR --prompt TEXT"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from cai_apps.config.arguments import parse
from cai_apps.config.ranges import COUNT, NATURAL, SEED
from cai_apps.run.files.directory import RunDirectory


@dataclass(frozen=True)
class Arguments:
    """Continue a prompt with an exported model."""

    directory: Annotated[Path, tyro.conf.Positional]
    """HF model directory, or a run directory with an export."""
    prompt: str = "def "
    tokens: Annotated[int, COUNT] = 64
    """Length of the continuation."""
    temperature: Annotated[float, NATURAL] = 0.8
    """0: always the likeliest token."""
    seed: Annotated[int, SEED] = 0
    special_tokens: Literal["text", "parse"] = "text"
    """Control tokens written in the prompt, such as </s>: 'text' like any other, or 'parse' them."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="generate")
    from cai_apps.applications.language.generate import generate

    run_directory = RunDirectory(options.directory)
    directory = run_directory.export if run_directory.config_file.is_file() else options.directory
    names = ("tokens", "temperature", "seed", "special_tokens")
    print(generate(directory, options.prompt, **{name: getattr(options, name) for name in names}))
    return 0
