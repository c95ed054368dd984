"""Pictures from a trained denoiser, with guidance, through the decoder."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cai_apps.applications.diffusion.model.captions import join, load_tokenizers, read, tokenize
from cai_apps.applications.diffusion.model.design import Design, load_design
from cai_apps.applications.diffusion.model.encoders import Autoencoder, load_autoencoder, load_text
from cai_apps.applications.diffusion.model.families import predicts_variance
from cai_apps.applications.diffusion.model.loading import (
    EVERYTHING,
    Memory,
    denoiser_home,
    load_denoiser,
    settle_text,
)
from cai_apps.applications.diffusion.sampling.graphs import Forward, Graphed
from cai_apps.applications.diffusion.sampling.labels import label_names, label_numbers
from cai_apps.applications.diffusion.sampling.patches.branches import Branches, open_branches
from cai_apps.applications.diffusion.sampling.patches.denoiser import Mode, PatchDenoiser, split_denoiser
from cai_apps.applications.diffusion.sampling.patches.strips import Strips
from cai_apps.applications.diffusion.sampling.picture_sizes import sides
from cai_apps.applications.diffusion.sampling.scheduler import Options, denoise, make_scheduler
from cai_gemini import HostModel
from cai_kernels.swap import Swapped, swap
from cai_mesh import rng
from cai_mesh.errors import ConfigError


class Sampler:
    """An exported model that draws on one device.

    What is drawn goes through the parts one after the other: text encoders for all prompts, the denoiser, the
    autoencoder. Each is on the device only while it works. They are read from files at their first use, and
    quantized where `memory` says so; from then on they stay on the host for as long as the sampler is there.

    Args:
        directory: the directory of an export, or of a pipeline of diffusers.
        raw: the last weights of the denoiser, where the export holds averaged ones too.
        memory: the way in which weights are held in memory and pictures are decoded.
        graphs: whether steps on a GPU are replayed as CUDA graphs (`graphs`), in which norms run our kernels; weights
            that come layer by layer and pictures in strips are not.

    Attributes:
        device: the device on which it draws.
        seconds: the seconds that the last call took to denoise and decode, without what was read from files.

    Raises `ConfigError` where a part is missing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        raw: bool = False,
        memory: Memory = EVERYTHING,
        graphs: bool = True,
    ):
        self.design: Design = load_design(str(directory))
        self._directory, self.device, self._dtype = directory, torch.device(device), dtype
        self._home, self._memory = denoiser_home(self.design, directory, raw=raw), memory
        self._patches: PatchDenoiser | None = None
        self._branches: Branches | None = None
        self._texts: dict[int, HostModel] = {}
        self._graphs = graphs and self.device.type == "cuda" and memory.residency == "device"
        self._swapped: Swapped | None = None
        self.seconds = 0.0

    @functools.cached_property
    def _denoiser(self) -> HostModel:
        return load_denoiser(
            self.design, self._home, device=self.device, dtype=self._dtype, memory=self._memory
        )

    @functools.cached_property
    def _tokenizers(self) -> list[Any]:
        return load_tokenizers(self._directory, self.design.texts)

    @functools.cached_property
    def _labels(self) -> list[str]:
        return label_names(self._directory)

    def _text(self, number: int) -> HostModel:
        """One of the text encoders."""
        if number not in self._texts:
            model = load_text(
                self.design, number, seed=0, dtype=self._dtype, device="cpu", directory=self._directory
            )
            self._texts[number] = settle_text(model, self.device, self._memory)
        return self._texts[number]

    @functools.cached_property
    def _autoencoder(self) -> tuple[Autoencoder, AbstractContextManager[Any]]:
        """The autoencoder, and the context in which it is on the device."""
        autoencoder = load_autoencoder(
            self.design, seed=0, dtype=self._dtype, device="cpu", directory=self._directory
        )
        autoencoder = replace(autoencoder, decoding=self._memory.vae)
        return autoencoder, nullcontext() if autoencoder.model is None else HostModel(
            autoencoder.model, self.device
        )

    def split(
        self, group: dist.ProcessGroup, *, mode: Mode = "exact", warmup: int = 4, branches: bool = False
    ) -> None:
        """Make each picture on all ranks of a group; all of them then draw the same prompts.

        Args:
            branches: half of the ranks predict without the prompt, half with it; each half makes strips of the
                picture. Two ranks then exchange a prediction a step, and nothing in between. For guidance alone.
                False: all ranks make strips of both predictions.

        The others and their errors are those of `split_denoiser`.

        Raises:
            ConfigError: branches of an odd number of ranks.
        """
        if branches:
            self._branches = open_branches(group)
            group = self._branches.half
            if dist.get_world_size(group) == 1:
                return
        if self.design.scheduler.get("thresholding"):
            raise ConfigError(
                "this scheduler cannot work on strips",
                got="thresholding = true",
                cause="it looks at the brightest pixels of the whole picture",
            )
        if self._swapped is not None:
            self._swapped.undo()
        self._patches = split_denoiser(self._denoiser.model, group, mode=mode, warmup=warmup)

    def check(self, prompts: Sequence[str], options: Options, *, strips: int = 1) -> None:
        """Refuse what cannot be drawn, before weights are read.

        Args:
            strips: the number of strips in which ranks make each picture.

        Raises:
            ConfigError: the size, the scheduler, a label or `Memory` does not fit the model.
        """
        make_scheduler(self.design, options)
        height, _ = sides(self.design, options.size)
        if self.design.family.condition == "label":
            label_numbers(self.design, prompts, self._labels)
        if self.design.autoencoder is None and self._memory.vae != "auto":
            raise ConfigError(
                "this model works on pixels: there is nothing to decode",
                got=f"--vae {self._memory.vae}",
                fix="leave it out",
            )
        if strips > 1:
            multiple = self.design.family.multiple(self.design.denoiser)
            Strips(strips, 0).check(height // self.design.factor, multiple)

    def pictures(self, prompts: Sequence[str], options: Options, *, first: int = 0) -> np.ndarray:
        """uint8 [prompts, height, width, 3].

        Args:
            prompts: captions, or names or numbers of labels.
            first: number of the first picture; with the seed it decides on the noise.
        """
        return self.in_batches(prompts, options, batch=max(len(prompts), 1), first=first)

    def in_batches(
        self,
        prompts: Sequence[str],
        options: Options,
        *,
        batch: int,
        first: int = 0,
        on_progress: Callable[[int], None] = lambda drawn: None,
    ) -> np.ndarray:
        """`pictures`, so many at once; the same pictures whatever that is.

        Args:
            on_progress: called with the number of pictures that are through the denoiser so far.
        """
        latents = self._latents(prompts, options, batch, first, on_progress)
        autoencoder, device_context = self._autoencoder
        with device_context, torch.inference_mode():
            started = self._now()
            pictures = [
                autoencoder.images(part.to(self.device)).permute(0, 2, 3, 1).cpu().numpy() for part in latents
            ]
            self.seconds += self._now() - started
        return np.concatenate(pictures)

    def latents(self, prompts: Sequence[str], options: Options, *, first: int = 0) -> Tensor:
        """Latents of pictures, float32 [prompts, c, h, w], drawn at once."""
        (latents,) = self._latents(prompts, options, max(len(prompts), 1), first, lambda drawn: None)
        return latents.to(self.device)

    def _latents(
        self,
        prompts: Sequence[str],
        options: Options,
        batch: int,
        first: int,
        on_progress: Callable[[int], None],
    ) -> list[Tensor]:
        """Return the latents of each batch, on the host."""
        strips = 1 if self._patches is None else self._patches.strips.count
        self.check(prompts, options, strips=strips)
        if self._branches is not None and options.guidance == 1:
            raise ConfigError(
                "without guidance there is one prediction", got="guidance 1", fix="branches=False"
            )
        parts = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        conditions = self._conditions(parts, options.guidance)
        if self._records and self._swapped is None:  # started one by one, kernels would keep the host longer
            # outside inference mode: the kernels' trial takes gradients
            self._swapped = swap(self._denoiser.model, kinds=("norm",))
        with self._denoiser, torch.inference_mode():
            return self._drawn(self._forward(), parts, conditions, options, first, on_progress)

    def _drawn(
        self,
        forward: Forward,
        parts: Sequence[Sequence[str]],
        conditions: Sequence[dict[str, Tensor]],
        options: Options,
        first: int,
        on_progress: Callable[[int], None],
    ) -> list[Tensor]:
        """`_latents` of each batch, from what the denoiser takes of it; the denoiser is on the device."""
        latents, drawn, started = [], 0, self._now()
        for part, condition in zip(parts, conditions, strict=True):
            device_conditions = {name: value.to(self.device) for name, value in condition.items()}
            noise = self._noise(len(part), options, first + drawn)
            latents.append(self._denoised(forward, noise, device_conditions, options).cpu())
            drawn += len(part)
            on_progress(drawn)
        self.seconds = self._now() - started
        return latents

    @property
    def _records(self) -> bool:
        """Whether steps are recorded as graphs."""
        return self._graphs and self._patches is None

    def _forward(self) -> Forward:
        """The denoiser's, of a strip where ranks make a picture together."""
        if self._patches is not None:
            patches = self._patches
            return lambda arguments: patches.forward(**arguments)
        model = self._denoiser.model
        plain: Forward = lambda arguments: model(**arguments, return_dict=False)[0]  # noqa: E731
        return Graphed(plain) if self._records else plain

    def _denoised(
        self, forward: Forward, noise: Tensor, conditions: dict[str, Tensor], options: Options
    ) -> Tensor:
        scheduler = make_scheduler(self.design, options)

        def predict(x: Tensor, at: Tensor) -> Tensor:
            return self._guided(forward, x, at, conditions, options.guidance)

        if self._patches is None:
            return denoise(predict, noise, scheduler)
        return self._patches.gather(denoise(predict, self._patches.start(noise), scheduler))

    def _conditions(self, parts: Sequence[Sequence[str]], guidance: float) -> list[dict[str, Tensor]]:
        """What the denoiser takes of each batch of prompts, on the host; with guidance those of no prompt come before
        them. Text encoders are back on the host when it returns."""
        free = [[""] * len(part) if guidance != 1 else [] for part in parts]
        if self.design.family.condition == "label":
            none = self.design.denoiser["num_embeds_ada_norm"]
            labels = [label_numbers(self.design, part, self._labels) for part in parts]
            return [
                {"label": torch.tensor([none] * len(f) + numbers)}
                for f, numbers in zip(free, labels, strict=True)
            ]
        tokens = [self._tokens([*f, *part]) for f, part in zip(free, parts, strict=True)]
        outputs: list[list[dict[str, Tensor]]] = [[] for _ in parts]
        for number in range(len(self.design.texts)):
            for of_part, output in zip(outputs, self._read(number, tokens), strict=True):
                of_part.append(output)
        return [join(self.design.family, self.design.denoiser, part_outputs) for part_outputs in outputs]

    def _read(self, number: int, tokens: Sequence[Sequence[Tensor]]) -> list[dict[str, Tensor]]:
        """What a text encoder says of each batch, on the host."""
        with self._text(number) as text, torch.inference_mode():
            outputs = []
            for part_tokens in tokens:
                output = read(
                    self.design.family, text.model, part_tokens[number].to(self.device), self._dtype
                )
                outputs.append({name: value.cpu() for name, value in output.items()})
            return outputs

    def _tokens(self, prompts: Sequence[str]) -> list[Tensor]:
        tokens, truncated_captions = tokenize(self._tokenizers, prompts, self.design.text_lengths)
        for number in truncated_captions:
            print(f"cut after {self.design.text_length} tokens: {prompts[number]!r}", flush=True)
        return tokens

    def _noise(self, count: int, options: Options, first: int) -> Tensor:
        factor = self.design.factor
        height, width = sides(self.design, options.size)
        noise = torch.empty(count, self.design.channels, height // factor, width // factor)
        for number in range(count):
            rng.normal_(noise[number], rng.key(options.seed, "picture", first + number))
        return noise.to(self.device)

    def _guided(
        self, forward: Forward, x: Tensor, at: Tensor, conditions: dict[str, Tensor], guidance: float
    ) -> Tensor:
        branches = self._branches
        if branches is not None:
            conditions = branches.own(conditions)
        twice = torch.cat([x, x]) if guidance != 1 and branches is None else x
        times = at.to(self.device).expand(len(twice))
        prediction = forward(self.design.family.takes(twice.to(self._dtype), times, conditions)).float()
        if predicts_variance(self.design.denoiser):
            prediction = prediction.chunk(2, 1)[0]
        if guidance == 1:
            return prediction
        unconditional, conditional = prediction.chunk(2) if branches is None else branches.both(prediction)
        return unconditional + guidance * (conditional - unconditional)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def open_sampler(
    directory: Path,
    *,
    raw: bool = False,
    device: torch.device | None = None,
    memory: Memory = EVERYTHING,
) -> Sampler:
    """A sampler in bfloat16 on a GPU, in float32 on the CPU; on the GPU where `device` is None and there is one."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Sampler(directory, device=device, dtype=dtype, raw=raw, memory=memory)


def grid(pictures: np.ndarray, columns: int) -> np.ndarray:
    """Pictures [n, height, width, 3] side by side in rows of `columns`, with a white line between them."""
    n, height, width, _ = pictures.shape
    rows = -(-n // columns)
    full = np.full((rows * (height + 2) - 2, columns * (width + 2) - 2, 3), 255, dtype=np.uint8)
    for number, picture in enumerate(pictures):
        first_row, first_column = (number // columns) * (height + 2), (number % columns) * (width + 2)
        full[first_row : first_row + height, first_column : first_column + width] = picture
    return full
