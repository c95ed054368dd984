"""Pictures from a trained denoiser: the steps from noise to latents, with guidance, and the decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.design import LABELS, RAW, Design, load_design
from cai_apps.applications.diffusion.encoders import Autoencoder, load_autoencoder, load_texts
from cai_apps.applications.diffusion.families import predicts_variance
from cai_apps.applications.diffusion.patches import Mode, PatchDenoiser, split_denoiser
from cai_apps.applications.diffusion.process import open_scheduler
from cai_apps.applications.diffusion.text import embed, load_tokenizers, tokenize
from cai_mesh import rng
from cai_mesh.errors import ConfigError, did_you_mean

SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "dpm": "DPMSolverMultistepScheduler",
    "flow": "FlowMatchEulerDiscreteScheduler",
}


@dataclass(frozen=True)
class Options:
    """How pictures are made.

    Args:
        size: side in pixels; None: of the images it was trained on.
        steps: of the scheduler.
        guidance: 1: none.
        scheduler: "auto", "ddim", "dpm" or "flow".
        seed: picture number i starts from noise of (seed, i), whatever else is drawn with it.
    """

    size: int | None = None
    steps: int = 20
    guidance: float = 4.0
    scheduler: str = "auto"
    seed: int = 0


def options(config: Config) -> Options:
    """How a run's own pictures are drawn."""
    sampling = config.sampling
    return Options(config.data.size, sampling.steps, sampling.guidance, sampling.scheduler, sampling.seed)


class Sampler:
    """An exported model on one device.

    The text encoders are loaded when prompts are embedded and freed after it.

    Args:
        directory: of an export, or of a pipeline of diffusers.
        raw: the last weights of the denoiser, where the export holds averaged ones too.

    Raises `ConfigError` where a part is missing.
    """

    def __init__(self, directory: Path, *, device: torch.device | str, dtype: torch.dtype, raw: bool = False):
        import diffusers

        self.design: Design = load_design(str(directory))
        self._directory, self._device, self._dtype = directory, torch.device(device), dtype
        kind = getattr(diffusers, self.design.denoiser["_class_name"])
        folder = self.design.family.folder
        home = directory / RAW / folder if raw else directory / folder
        if not home.is_dir():
            raise ConfigError(f"no weights at {home}", cause="the run kept no average of its weights")
        denoiser: nn.Module = kind.from_pretrained(home, torch_dtype=dtype)
        self.denoiser = denoiser.to(device).eval().requires_grad_(False)
        self.autoencoder: Autoencoder = load_autoencoder(
            self.design, seed=0, dtype=dtype, device=device, directory=directory
        )
        self._patches: PatchDenoiser | None = None

    def split(self, group: dist.ProcessGroup, *, mode: Mode = "exact", warmup: int = 4) -> None:
        """Make each picture on all ranks of a group, in strips; all of them then draw the same prompts.

        Args: those of `split_denoiser`, and its errors.
        """
        if self.design.scheduler.get("thresholding"):
            raise ConfigError(
                "this scheduler cannot work on strips",
                got="thresholding = true",
                cause="it looks at the brightest pixels of the whole picture",
            )
        self._patches = split_denoiser(self.denoiser, group, mode=mode, warmup=warmup)

    @torch.inference_mode()
    def pictures(self, prompts: Sequence[str], options: Options, *, first: int = 0) -> np.ndarray:
        """uint8 [prompts, side, side, 3].

        Args:
            prompts: captions, or names or numbers of labels.
            first: number of the first picture; with the seed it decides on the noise.
        """
        latents = self.latents(prompts, options, first=first)
        return self.autoencoder.images(latents).permute(0, 2, 3, 1).cpu().numpy()

    def in_batches(self, prompts: Sequence[str], options: Options, *, batch: int) -> np.ndarray:
        """`pictures`, so many at once; the same pictures whatever that is."""
        parts = range(0, len(prompts), batch)
        return np.concatenate([self.pictures(prompts[i : i + batch], options, first=i) for i in parts])

    @torch.inference_mode()
    def latents(self, prompts: Sequence[str], options: Options, *, first: int = 0) -> Tensor:
        """Latents of pictures, float32 [prompts, c, h, w]."""
        scheduler = make_scheduler(self.design, options)
        noise = self._noise(len(prompts), options, first)
        given = self.conditions(prompts, options.guidance)

        def said(x: Tensor, time: Tensor) -> Tensor:
            return self._guided(x, time, given, options.guidance)

        if self._patches is None:
            return denoise(said, noise, scheduler)
        return self._patches.gather(denoise(said, self._patches.start(noise), scheduler))

    def conditions(self, prompts: Sequence[str], guidance: float) -> dict[str, Tensor]:
        """What the denoiser takes of prompts; with guidance those of no prompt come before them."""
        if self.design.family.condition == "label":
            labels = label_numbers(self.design, prompts, label_names(self._directory))
            free = [self.design.denoiser["num_embeds_ada_norm"]] * len(prompts) if guidance != 1 else []
            return {"label": torch.tensor(free + labels, device=self._device)}
        texts = load_texts(
            self.design, seed=0, dtype=self._dtype, device=self._device, directory=self._directory
        )
        tokenizers = load_tokenizers(self._directory, len(self.design.texts))
        free = [""] * len(prompts) if guidance != 1 else []
        tokens, cut = tokenize(tokenizers, [*free, *prompts], self.design.text_length)
        for number in cut:
            print(f"cut after {self.design.text_length} tokens: {[*free, *prompts][number]!r}", flush=True)
        return embed(self.design.family, self.design.denoiser, texts, tokens.to(self._device), self._dtype)

    def _noise(self, count: int, options: Options, first: int) -> Tensor:
        size = options.size or self.design.denoiser["sample_size"] * self.design.factor
        if size % self.design.multiple:
            raise ConfigError(
                "pictures of this size do not divide into latents and patches",
                got=size,
                expected=f"a multiple of {self.design.multiple}",
            )
        side = size // self.design.factor
        shape = (self.design.channels, side, side)
        noise = torch.empty(count, *shape)
        for number in range(count):
            rng.normal_(noise[number], rng.key(options.seed, "picture", first + number))
        return noise.to(self._device)

    def _guided(self, x: Tensor, time: Tensor, given: dict[str, Tensor], guidance: float) -> Tensor:
        twice = torch.cat([x, x]) if guidance != 1 else x
        times = time.to(self._device).expand(len(twice))
        taken = self.design.family.takes(twice.to(self._dtype), times, given)
        if self._patches is None:
            said = self.denoiser(**taken, return_dict=False)[0].float()
        else:
            said = self._patches.forward(**taken).float()
        if predicts_variance(self.design.denoiser):
            said = said.chunk(2, 1)[0]
        if guidance == 1:
            return said
        free, told = said.chunk(2)
        return free + guidance * (told - free)


def denoise(model: Callable[[Tensor, Tensor], Tensor], noise: Tensor, scheduler: Any) -> Tensor:
    """All steps of a scheduler whose times are set, from standard normal noise; `model` is called with (x, time)."""
    x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    for time in scheduler.timesteps:
        told = scheduler.scale_model_input(x, time) if hasattr(scheduler, "scale_model_input") else x
        x = scheduler.step(model(told, time), time, x, return_dict=False)[0]
    return x


def make_scheduler(design: Design, options: Options) -> Any:
    """A scheduler of diffusers with its times set.

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
    if name == "ddim":
        config |= {"set_alpha_to_one": False, "steps_offset": 1, "timestep_spacing": "leading"}
    scheduler = getattr(diffusers, SCHEDULERS[name]).from_config(config)
    scheduler.set_timesteps(options.steps)
    return scheduler


def label_numbers(design: Design, prompts: Sequence[str], names: Sequence[str]) -> list[int]:
    """Numbers of labels that prompts name.

    Args:
        names: of the labels that are known by name, in their order.

    Raises:
        ConfigError: a prompt is neither a name nor a number that the denoiser knows.
    """
    known = design.denoiser["num_embeds_ada_norm"]
    for prompt in prompts:
        if prompt not in names and not (prompt.isdecimal() and int(prompt) < known):
            raise ConfigError(
                f"no label {prompt!r}",
                expected=f"a number below {known}, or a name",
                fix=did_you_mean(prompt, names),
            )
    return [names.index(prompt) if prompt in names else int(prompt) for prompt in prompts]


def label_names(directory: Path) -> list[str]:
    """Names of the labels that a run was trained on, in their order; empty where nobody wrote them."""
    file = directory / LABELS
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def open_sampler(directory: Path, *, raw: bool = False, device: torch.device | None = None) -> Sampler:
    """A sampler in bfloat16 on a GPU, in float32 on the CPU; on the GPU where `device` is None and there is one."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Sampler(directory, device=device, dtype=dtype, raw=raw)


def grid(pictures: np.ndarray, columns: int) -> np.ndarray:
    """Pictures [n, side, side, 3] side by side in rows of `columns`, with a white line between them."""
    n, height, width, _ = pictures.shape
    rows = -(-n // columns)
    full = np.full((rows * (height + 2) - 2, columns * (width + 2) - 2, 3), 255, dtype=np.uint8)
    for number, picture in enumerate(pictures):
        top, left = (number // columns) * (height + 2), (number % columns) * (width + 2)
        full[top : top + height, left : left + width] = picture
    return full
