"""Steps from noise to latents: the options of pictures, and the scheduler of diffusers that they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.model.design import Design
from cai_apps.applications.diffusion.model.noise_process import open_scheduler
from cai_apps.applications.diffusion.sampling.picture_sizes import Size
from cai_mesh.errors import ConfigError

SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "dpm": "DPMSolverMultistepScheduler",
    "flow": "FlowMatchEulerDiscreteScheduler",
}
OF_PIPELINES = {"steps_offset": 1, "clip_sample": False}
"""What `StableDiffusionPipeline` sets in its scheduler's config, whatever the file says."""


@dataclass(frozen=True)
class Options:
    """How pictures are made.

    Args:
        size: side in pixels, or height and width; None: of the images it was trained on.
        steps: the number of steps of the scheduler.
        guidance: 1: none.
        scheduler: "auto", "ddim", "dpm" or "flow".
        seed: picture number i starts from noise of (seed, i), whatever else is drawn with it.
    """

    size: Size | None = None
    steps: int = 20
    guidance: float = 4.0
    scheduler: str = "auto"
    seed: int = 0


def options(config: Config) -> Options:
    """How a run's own pictures are drawn."""
    sampling = config.sampling
    return Options(config.data.size, sampling.steps, sampling.guidance, sampling.scheduler, sampling.seed)


def denoise(model: Callable[[Tensor, Tensor], Tensor], noise: Tensor, scheduler: Any) -> Tensor:
    """All steps of a scheduler whose times are set, from standard normal noise; `model` is called with (x, time)."""
    x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    for at in scheduler.timesteps:
        model_input = scheduler.scale_model_input(x, at) if hasattr(scheduler, "scale_model_input") else x
        x = scheduler.step(model(model_input, at), at, x, return_dict=False)[0]
    return x


def make_scheduler(design: Design, options: Options) -> Any:
    """Return a scheduler of diffusers with its times set, by the model's own config.

    It is what the pipeline has that `from_pretrained` opens with a scheduler of this class, read from the model's
    directory: with the spacing, offset and final share of the image that the model was published with.

    Raises:
        ConfigError: it is for a flow and the denoiser is not, or the other way round; or the design's own is not known.
    """
    import diffusers

    open_scheduler(design.scheduler)
    flow = design.family.flow
    name = options.scheduler if options.scheduler != "auto" else ("flow" if flow else "dpm")
    if (name == "flow") != flow:
        raise ConfigError(
            f"the scheduler {name!r} is not for a {design.family.name}",
            expected="flow" if flow else "ddim or dpm",
        )
    config = {key: value for key, value in design.scheduler.items() if key != "_class_name"}
    if design.family.name == "UNet":
        config |= OF_PIPELINES
    scheduler = getattr(diffusers, SCHEDULERS[name]).from_config(config)
    scheduler.set_timesteps(options.steps)
    return scheduler
