"""What training a denoiser means: how a microbatch is made noisy, what goes into the model, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.applications.diffusion.config import Config
from cai_apps.applications.diffusion.data.ratios import shapes_of
from cai_apps.applications.diffusion.data.samples import draw
from cai_apps.applications.diffusion.model.channels_last import keep_channels_last
from cai_apps.applications.diffusion.model.denoiser import build, check_shared, initializer, layers, parts
from cai_apps.applications.diffusion.model.design import T5_LENGTH, Design
from cai_apps.applications.diffusion.model.encoders import Autoencoder, encoder_directory, load_autoencoder
from cai_apps.applications.diffusion.model.families import predicts_variance
from cai_apps.applications.diffusion.model.noise_process import Process, process_of, squared_error
from cai_apps.applications.diffusion.model.tensor_parallel import trains_text, trial_of
from cai_apps.applications.diffusion.training.variance import StepBounds
from cai_apps.compose.apply import is_compiled
from cai_apps.compose.lora import plain_name
from cai_apps.compose.published_names import present_tensors
from cai_apps.compose.sharding import DTYPES
from cai_apps.compose.workload import Batch, Loss, Workload
from cai_apps.data.batches import PRESENT
from cai_mesh.checkpoint import load_hf

CONDITIONS = ("text", "pooled", "label", "tokens")
TARGETS = ("target", "weight")
VARIANCE = ("noisy", "clean", "time")
"""What the loss of a predicted variance takes beside those."""


@dataclass(frozen=True)
class Noising:
    """Makes a microbatch of `data.samples.Images` ready: latents, noise, what is to be learned, and its weight.

    Args:
        seed: the seed of the noise.
        offset: the amount of it that is alike all over a channel.
        compute: dtype of what goes into the model.
        variance: the model says the variance too.
        most: numbers of a sample's latents at most.
        layout: the memory format of the noisy latents.
    """

    process: Process
    autoencoder: Autoencoder
    seed: int
    offset: float
    compute: torch.dtype
    variance: bool
    most: int
    layout: torch.memory_format = torch.preserve_format

    def __call__(self, batch: Batch) -> Batch:
        """`noisy` in the dtype of computing, `time`, `target` and `weight`, and the condition as it was."""
        encoded_batch = batch if "mean" in batch else batch | self.autoencoder.moments(batch["pixels"])
        clean, time = self._clean(encoded_batch), self.process.time(batch["u"])
        noise = self._noise(clean, batch["position"])
        noisy = self.process.mix(clean, noise, time)
        ready = {
            "noisy": noisy.to(self.compute, memory_format=self.layout),
            "time": time,
            "target": self.process.target(clean, noise, time),
            "weight": self.process.weight(time) * batch.get("share", 1.0) * batch.get(PRESENT, 1.0),
        }
        if self.variance:
            ready["clean"] = clean
        for name in CONDITIONS:
            if name in batch:
                value = batch[name]
                ready[name] = value.to(self.compute) if value.is_floating_point() else value
        return ready

    def _clean(self, encoded_batch: Batch) -> Tensor:
        """Latents, in float32 at least."""
        mean, std = encoded_batch["mean"], encoded_batch.get("std")
        drawn = (
            None
            if std is None
            else draw(mean, encoded_batch["position"], self.seed, "posterior", self.most).to(mean.dtype)
        )
        return self.autoencoder.latents(mean, std, drawn).to(torch.promote_types(self.compute, torch.float32))

    def _noise(self, like: Tensor, position: Tensor) -> Tensor:
        noise = draw(like, position, self.seed, "noise", self.most)
        if self.offset:
            noise += self.offset * draw(like[:, :, :1, :1], position, self.seed, "offset")
        return noise.to(like.dtype)


def workload(config: Config, design: Design, device: torch.device | None = None) -> Workload:
    """The workload of a config.

    Args:
        device: this rank's device; None: nothing will be encoded, the workload is only planned.
    """
    compute = DTYPES[config.precision.compute]
    process = process_of(
        design.scheduler,
        min_snr=config.objective.min_snr,
        logit_normal=config.objective.timesteps == "logit_normal",
    )
    variance = predicts_variance(design.denoiser)
    layout = _layout(config, design, device)

    def denoiser() -> nn.Module:
        model = build(design, train_text=trains_text(config, design), lora=config.lora)
        if layout == torch.channels_last:
            denoiser_modules = set(model.denoiser.modules())
            keep_channels_last(layer for layer in layers(model) if layer in denoiser_modules)
        return model

    return Workload(
        build=denoiser,
        ready=Noising(
            process,
            _autoencoder(config, design, device),
            config.train.seed,
            config.objective.offset_noise,
            compute,
            variance,
            design.channels * (config.data.size // design.factor) ** 2,
            layout,
        ),
        inputs=lambda batch: {
            "sample": batch["noisy"],
            "time": batch["time"],
            **{name: batch[name] for name in CONDITIONS if name in batch},
        },
        target=lambda batch: {name: batch[name] for name in (*TARGETS, *(VARIANCE if variance else ()))},
        loss=lambda model, mesh: _loss(process, variance),
        example=lambda samples: _example(config, design, samples, compute, variance),
        initializer=initializer(design),
        layers=layers,
        sizes=len(shapes_of(config.data.size, config.data.max_ratio, design.multiple)),
        pretrained=_pretrained(config, design),
        has_base=bool(config.lora.rank),
        trial=trial_of(
            design,
            train_text=trains_text(config, design),
            ranks=config.parallel.tensor.size,
            lora=config.lora,
        ),
    )


def _layout(config: Config, design: Design, device: torch.device | None) -> torch.memory_format:
    """Compiled convolutions keep channels last; torch's own group norm would turn them back at every layer."""
    last = design.family.convolutional and device is not None and is_compiled(config, device)
    return torch.channels_last if last else torch.preserve_format


def _autoencoder(config: Config, design: Design, device: torch.device | None) -> Autoencoder:
    """Loaded only where images are encoded at every step; else its scale is all that is asked for."""
    if design.autoencoder is None or device is None:
        return Autoencoder(design)
    return load_autoencoder(
        design,
        seed=config.train.seed,
        dtype=DTYPES[config.data.encoder_dtype],
        device=device if config.data.latents == "encoded" else "cpu",
        directory=encoder_directory(config, design),
    )


def _pretrained(config: Config, design: Design) -> Callable[[nn.Module], None] | None:
    """Loads each trained part from its folder of a pipeline's directory."""
    directory = encoder_directory(config, design)
    if directory is None:
        return None

    def load(model: nn.Module) -> None:
        if design.family.name == "DiT":
            check_shared(directory / design.family.folder)
        for within, folder in parts(design, train_text=trains_text(config, design)).items():
            tensors = partial(present_tensors, model.get_submodule(within.removesuffix(".")))
            load_hf(model, directory / folder, within=within, names=plain_name, tensors=tensors)

    return load


def _loss(process: Process, variance: bool) -> Loss:
    def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        if not variance:
            return squared_error(output, target["target"], target["weight"])
        noise, v = output.to(target["target"].dtype).chunk(2, 1)
        bits = StepBounds(process.kept).loss(  # type: ignore[attr-defined]
            noise, v, target["clean"], target["noisy"].to(noise.dtype), target["time"]
        )
        present = target["weight"] != 0
        return squared_error(noise, target["target"], target["weight"]) + (bits * present).sum()

    return loss


def _example(config: Config, design: Design, samples: int, compute: torch.dtype, variance: bool) -> Batch:
    """A ready microbatch of any values."""
    side = config.data.size // design.factor
    noisy = torch.zeros(samples, design.channels, side, side, dtype=compute)
    full = noisy.to(torch.promote_types(compute, torch.float32))
    time = torch.zeros(samples, dtype=torch.float32 if design.family.flow else torch.int64)
    batch: dict[str, Any] = {
        "noisy": noisy,
        "time": time,
        "target": full,
        "weight": torch.ones(samples, dtype=torch.float64),
    }
    if variance:
        batch["clean"] = full
    family, denoiser, length = design.family, design.denoiser, design.text_length
    if family.condition == "label":
        return batch | {"label": torch.zeros(samples, dtype=torch.int64)}
    if config.model.text_encoder == "trained":
        return batch | {"tokens": torch.zeros(samples, len(design.texts), length, dtype=torch.int64)}
    if "pooled" in family.widths:
        length += T5_LENGTH
        batch["pooled"] = torch.zeros(samples, denoiser[family.widths["pooled"]], dtype=compute)
    return batch | {"text": torch.zeros(samples, length, denoiser[family.widths["text"]], dtype=compute)}
