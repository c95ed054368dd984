"""A denoiser that works on one strip of the latents on each rank (DistriFusion, arXiv:2402.19481)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cai_apps.applications.diffusion.model.families import family_of
from cai_apps.applications.diffusion.sampling.patches.exchange import Clock, Exchange
from cai_apps.applications.diffusion.sampling.patches.layer_classes import SUPPORTED
from cai_apps.applications.diffusion.sampling.patches.layers import check_layers, teach
from cai_apps.applications.diffusion.sampling.patches.strips import Strips
from cai_mesh.errors import ConfigError

Mode = Literal["exact", "stale"]


class PatchDenoiser:
    """A denoiser of diffusers that works on one strip of the latents on each rank; made by `split_denoiser`."""

    def __init__(self, denoiser: nn.Module, group: dist.ProcessGroup, clock: Clock):
        self.denoiser = denoiser
        self.strips = Strips(dist.get_world_size(group), dist.get_rank(group))
        self._group, self._clock = group, clock
        self._exchanges: list[Exchange] = []
        config: Any = denoiser.config
        kind = type(denoiser).__name__
        self._multiple = family_of(kind).multiple(config)
        self._pads = kind == "DiTTransformer2DModel"
        check_layers(denoiser, SUPPORTED)
        teach(denoiser, self.strips, self._exchange)

    def _exchange(self, name: str) -> Exchange:
        self._exchanges.append(Exchange(name, self._group, self._clock))
        return self._exchanges[-1]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has received of others in its layers since the last `start`."""
        return self._clock.nbytes

    def start(self, latents: Tensor) -> Tensor:
        """This rank's strip of the latents of new pictures, [n, c, h, w] alike on all ranks -> [n, c, h / ranks, w].

        Raises:
            ConfigError: the rows do not divide among the ranks, or a DiT's picture is not square.
        """
        self.strips.check(latents.shape[2], self._multiple)
        if self._pads and latents.shape[2] != latents.shape[3]:
            raise ConfigError("a DiT makes square pictures", got=tuple(latents.shape[2:]))
        self.finish()
        self._clock.step, self._clock.nbytes = -1, 0
        return self.strips.cut(latents)

    def forward(self, **arguments: Any) -> Tensor:
        """One step: the denoiser's keyword arguments, of which the sample is a strip -> what is in the strip."""
        self._clock.step += 1
        prediction = self.denoiser(**arguments, return_dict=False)[0]
        return self.strips.cut(prediction) if self._pads else prediction

    def finish(self) -> None:
        """Wait for what is under way and forget the picture; all ranks call it."""
        for exchange in self._exchanges:
            exchange.clear()

    def gather(self, strip: Tensor) -> Tensor:
        """The whole of strips [n, c, h, w], from top to bottom, on every rank."""
        self.finish()
        parts = [
            torch.empty_like(strip, memory_format=torch.contiguous_format) for _ in range(self.strips.count)
        ]
        dist.all_gather(parts, strip.contiguous(), group=self._group)
        return torch.cat(parts, 2)


def split_denoiser(
    denoiser: nn.Module, group: dist.ProcessGroup, *, mode: Mode = "exact", warmup: int = 4
) -> PatchDenoiser:
    """Let the ranks of a group make pictures together. The denoiser is changed in place.

    Args:
        denoiser: a UNet2DConditionModel, DiTTransformer2DModel or SD3Transformer2DModel, alike on all ranks.
        group: its ranks hold the strips from top to bottom.
        mode: exact: every layer computes what one device would; stale: after `warmup` exact steps a layer takes what
            its neighbours had a step before, while that of this step is on its way.
        warmup: exact steps of a stale picture, 1 or more.

    Raises:
        ConfigError: a mode or a warmup that does not exist, or a denoiser of another kind.
        PlanError: a layer that may mix rows in a way that is not known here.
    """
    if mode not in ("exact", "stale"):
        raise ConfigError("a mode that does not exist", got=mode, expected="exact or stale")
    if warmup < 1:
        raise ConfigError(
            "too few exact steps", got=warmup, expected="1 or more", cause="the first has no past"
        )
    return PatchDenoiser(denoiser, group, Clock(warmup=warmup if mode == "stale" else None))
