"""cai generate DIR --prompt TEXT, of a diffusion model"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from cai_apps.applications.diffusion import need_diffusers
from cai_apps.cli.arguments import parse
from cai_apps.run.directory import RunDirectory
from cai_mesh.errors import ConfigError


@dataclass(frozen=True)
class Arguments:
    """Draw pictures for prompts with a trained diffusion model."""

    directory: Annotated[Path, tyro.conf.Positional]
    """A run directory with an export, or a directory of diffusers."""
    prompt: tuple[str, ...] = ()
    """Captions, or labels by name or number; several after one another."""
    images: int = 1
    """Pictures of each prompt."""
    size: int | None = None
    """Side in pixels; that of the training images unless given."""
    steps: int = 20
    """Denoising steps."""
    guidance: float = 4.0
    """How far what the prompt changes is taken; 1: as far as it was learned."""
    scheduler: Literal["auto", "ddim", "dpm", "flow"] = "auto"
    seed: int = 0
    batch: int = 8
    """Pictures that are drawn at once."""
    raw: bool = False
    """Use the last weights, where averaged ones are there too."""
    output: Path | None = None
    """A .png file for all pictures in a grid, a row a prompt; pictures.png in the directory unless given."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="generate")
    need_diffusers()
    if not options.prompt:
        raise ConfigError("no prompt", expected='--prompt "a red circle" "a blue square"')
    for name in ("images", "steps", "batch"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} is too small", got=getattr(options, name), expected="at least 1")
    from PIL import Image

    from cai_apps.applications.diffusion.sample import Options, grid, open_sampler

    found = RunDirectory(options.directory)
    directory = found.export if found.config_file.is_file() else options.directory
    if not directory.is_dir():
        raise ConfigError(
            f"no export at {directory}",
            cause="the run has not ended, or this is no run",
            fix="train it to its end",
        )
    sampler = open_sampler(directory, raw=options.raw)
    drawing = Options(options.size, options.steps, options.guidance, options.scheduler, options.seed)
    prompts = [prompt for prompt in options.prompt for _ in range(options.images)]
    pictures = sampler.in_batches(prompts, drawing, batch=options.batch)
    output = options.output or options.directory / "pictures.png"
    Image.fromarray(grid(pictures, options.images)).save(output)
    print(output)
    return 0
