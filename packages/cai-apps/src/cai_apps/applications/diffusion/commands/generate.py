"""cai generate DIR --prompt TEXT, of a diffusion model"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from cai_apps.applications.diffusion import need_diffusers
from cai_apps.applications.diffusion.sampling.picture_sizes import parse_size
from cai_apps.config.arguments import parse
from cai_apps.config.environment import launched
from cai_apps.config.ranges import COUNT, NATURAL, SEED, Range
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.loop.progress import counted
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from cai_apps.applications.diffusion.sampling.sampler import Sampler


@dataclass(frozen=True)
class Arguments:
    """Draw pictures for prompts with a trained diffusion model."""

    directory: Annotated[Path, tyro.conf.Positional]
    """A run directory with an export, or a directory of diffusers."""
    prompt: tuple[str, ...] = ()
    """Captions, or labels by name or number; several after one another."""
    images: Annotated[int, COUNT] = 1
    """Pictures of each prompt."""
    size: str | None = None
    """Size in pixels, as 512, or as 512x768: height x width, in the order of diffusers' arguments. That of the training
    images unless given."""
    steps: Annotated[int, Range(least=1, most=1000)] = 20
    """Denoising steps."""
    guidance: float = 4.0
    """How far what the prompt changes is taken; 1: as far as it was learned."""
    scheduler: Literal["auto", "ddim", "dpm", "flow"] = "auto"
    seed: Annotated[int, SEED] = 0
    batch: Annotated[int, COUNT] = 8
    """Pictures that are drawn at once."""
    raw: bool = False
    """Use the last weights, where averaged ones are there too."""
    patches: Literal["none", "exact", "stale"] = "none"
    """How the ranks of a launcher make each picture together (arXiv:2402.19481). An even number of ranks with
    guidance: half of them predict without the prompt, half with it. Each half, or all of them, make strips of the
    picture; exact: as one device; stale: after patches_warmup steps with what neighbours had a step before."""
    patches_warmup: Annotated[int, NATURAL] = 4
    """Exact steps before stale ones."""
    weights: Literal["plain", "int8", "fp8"] = "plain"
    """How weights inside blocks of the denoiser and of text encoders are held. int8, fp8: in 8 bits with a scale a
    channel, made anew in bf16 (fp32 on a CPU) for each use: about half the memory, and a little slower."""
    residency: Literal["device", "host"] = "device"
    """Where those weights are. host: in host memory; each layer comes to the GPU while the one before it runs. The
    same pictures, slower."""
    vae: Literal["auto", "whole", "sliced", "tiled"] = "auto"
    """How pictures are decoded. whole: all of a batch at once; sliced: one by one; tiled: each in overlapping tiles,
    blended, which differs a little; auto: the first of these that fits in what is free of the GPU's memory."""
    output: Path | None = None
    """A .png file for all pictures in a grid, a row a prompt; pictures.png in the directory unless given."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="generate")
    need_diffusers()
    if not options.prompt:
        raise ConfigError("no prompt", expected='--prompt "a red circle" "a blue square"')
    if options.size is not None:
        parse_size(options.size)
    run_directory = RunDirectory(options.directory)
    directory = run_directory.export if run_directory.config_file.is_file() else options.directory
    if not directory.is_dir():
        raise ConfigError(
            f"no export at {directory}",
            cause="the run has not ended, or this is no run",
            fix="train it to its end",
        )
    if options.output is not None:
        _format(options.output)
    with _ranks(options) as device:
        _draw(options, directory, device)
    return 0


@contextmanager
def _ranks(options: Arguments) -> Iterator[torch.device | None]:
    """The device of this rank where several ranks make a picture; None: one process chooses.

    Raises:
        ConfigError: strips without ranks, or ranks without strips.
    """
    if launched() != (options.patches != "none"):
        raise ConfigError(
            "several ranks make a picture together, one process makes it alone",
            got=f"--patches {options.patches} {'under a launcher' if launched() else 'in one process'}",
            fix="cai run --nproc-per-node 2 -m cai_apps generate DIR --patches exact --prompt ...",
        )
    if options.patches == "none":
        yield None
        return
    import torch.distributed as dist

    from cai_apps.run.launch.devices import gpus
    from cai_apps.run.launch.rank import start_rank

    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        yield start_rank("cuda" if gpus("auto") >= local else "cpu")
    finally:
        dist.destroy_process_group()


def _draw(options: Arguments, directory: Path, device: torch.device | None) -> None:
    """Draw and write; of several ranks the first writes."""
    import torch.distributed as dist
    from PIL import Image

    from cai_apps.applications.diffusion.model.loading import Memory
    from cai_apps.applications.diffusion.sampling.sampler import grid, open_sampler
    from cai_apps.applications.diffusion.sampling.scheduler import Options

    memory = Memory(options.weights, options.residency, options.vae)
    sampler = open_sampler(directory, raw=options.raw, device=device, memory=memory)
    size = None if options.size is None else parse_size(options.size)
    drawing = Options(size, options.steps, options.guidance, options.scheduler, options.seed)
    prompts = [prompt for prompt in options.prompt for _ in range(options.images)]
    ranks = 1 if device is None else dist.get_world_size()
    branches = options.guidance != 1 and ranks % 2 == 0
    sampler.check(prompts, drawing, strips=ranks // 2 if branches else ranks)
    if options.patches != "none":
        assert dist.group.WORLD is not None
        how = {"mode": options.patches, "warmup": options.patches_warmup}
        sampler.split(dist.group.WORLD, **how, branches=branches)
    shows = device is None or dist.get_rank() == 0
    with counted(len(prompts), "pictures", visible=shows and len(prompts) > options.batch) as on_progress:
        pictures = sampler.in_batches(prompts, drawing, batch=options.batch, on_progress=on_progress)
    if shows:
        output = options.output or options.directory / "pictures.png"
        scratch = output.with_name(f".{output.name}.unfinished")
        Image.fromarray(grid(pictures, options.images)).save(scratch, format=_format(output))
        scratch.replace(output)
        print(output)
        _show_figures(sampler, len(prompts))


def _format(output: Path) -> str:
    """Return the format of a file, by its name. Raises `ConfigError` where Pillow writes none of that name."""
    from PIL import Image

    file_format = Image.registered_extensions().get(output.suffix.lower())
    if file_format not in Image.SAVE:
        raise ConfigError("no kind of picture has this name", got=output.name, expected="as pictures.png")
    return file_format


def _show_figures(sampler: Sampler, pictures: int) -> None:
    """What it took on a GPU."""
    import torch

    if sampler.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(sampler.device) / 2**30
        print(f"peak memory    {peak:.2f} GiB\nseconds        {sampler.seconds / pictures:.2f} a picture")
