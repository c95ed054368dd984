"""An application that is not about text: small pictures with a bright square, and in which quarter it lies.

Used by the tests of applications; it shows all that one has to bring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from cai_apps.applications import Application
from cai_apps.applications.loop import SharedLoop
from cai_apps.compose.workload import Workload
from cai_apps.config import sections
from cai_apps.config.validation import check, resolve
from cai_apps.report.outcome import show_outcome
from cai_apps.report.training import training_page
from cai_apps.run.files.origin import Origin
from cai_apps.run.files.position import Unit
from cai_apps.run.task import Work
from cai_mesh.checkpoint import save_hf
from cai_mesh.errors import ConfigError
from cai_pipeline import Trial

SIDE, PATCH = 8, 4


@dataclass(frozen=True)
class Model:
    width: int = 16
    layers: int = 4


@dataclass(frozen=True)
class Config(sections.RunConfig):
    application: Literal["images"] = "images"
    model: Model = field(default_factory=Model)
    samples: int = 256


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))) + x.mean(1, keepdim=True)


class Classifier(nn.Module):
    """Pixels [B, SIDE, SIDE] -> scores of the four quarters [B, 4]."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, width)
        self.positions = nn.Embedding((SIDE // PATCH) ** 2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        cut = pixels.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        x = self.patches(cut) + self.positions(torch.arange(cut.shape[1], device=cut.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).flatten(1).unflatten(1, (-1, x.shape[-1])).mean(1))


def initialize(module: nn.Module) -> None:
    """Normal numbers for matrices, ones and zeros for the rest."""
    for name, param in module.named_parameters(recurse=False):
        if param.ndim > 1:
            nn.init.normal_(param, std=0.2)
        else:
            nn.init.constant_(param, float(isinstance(module, nn.LayerNorm) and name == "weight"))


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, labels, reduction="sum")


def small() -> nn.Module:
    torch.manual_seed(0)
    return Classifier(8, 3)


def workload(config: Config) -> Workload:
    pixels = torch.linspace(-1, 1, 2 * SIDE * SIDE, dtype=torch.float64).view(2, SIDE, SIDE)
    return Workload(
        build=lambda: Classifier(config.model.width, config.model.layers),
        inputs=lambda batch: {"pixels": batch["pixels"]},
        target=lambda batch: batch["quarter"],
        loss=lambda model, mesh: cross_entropy,
        example=lambda samples: {
            "pixels": torch.zeros(samples, SIDE, SIDE),
            "quarter": torch.zeros(samples, dtype=torch.int64),
        },
        initializer=lambda model: initialize,
        trial=Trial(small, lambda: {"pixels": pixels}, lambda scores: scores.square().sum(), "blocks"),
    )


@dataclass(frozen=True)
class Squares:
    """Samples [first, first + size): noise, and a bright square in one quarter."""

    first: int
    size: int

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        pixels, quarters = [], []
        for index in indices:
            gen = torch.Generator().manual_seed(self.first + int(index))
            quarter = int(torch.randint(4, (), generator=gen))
            picture = torch.randn(SIDE, SIDE, generator=gen)
            top, left = 4 * (quarter // 2), 4 * (quarter % 2)
            picture[top : top + 4, left : left + 4] += 1.0
            pixels.append(picture)
            quarters.append(quarter)
        return {"pixels": torch.stack(pixels), "quarter": torch.tensor(quarters)}


class Images:
    def resolve(self, config: Config, ranks: int) -> Config:
        if config.parallel.tensor.size > 1:
            raise ConfigError(
                "pictures have no tensor-parallel plan", got=config.parallel.tensor.size, expected=1
            )
        return resolve(config, ranks)

    def workload(self, config: Config) -> Workload:
        return workload(config)

    def prepare(self, config: Config, before: Any = None) -> int:
        return config.samples

    def base(self, config) -> None:
        return None

    def origin(self, prepared: int) -> Origin:
        return Origin(
            {"quarters": "top left, top right, bottom left, bottom right"}, "noise", f"{prepared} pictures"
        )

    def announce(self, config: Config, prepared: int) -> str:
        return f"{config.samples} pictures"

    def fill(self, job: Any) -> None:
        (job.run.path / "classes.txt").write_text("four quarters")

    def work(self, job: Any) -> Work:
        samples = job.config.samples
        return Work(
            workload(job.config),
            Squares(0, samples),
            Squares(samples, 64),
            count=lambda batch: len(batch["quarter"]),
            counted="pictures",
            unit=Unit("images"),
        )

    def export(self, session: Any, job: Any) -> None:
        save_hf(session.model, job.run.export, weights=session.weights.masters(), dtype=torch.float32)

    def finish(self, job: Any) -> None:
        show_outcome(job.run, job.config)
        print(f"weights        {job.run.export}")


LOOP = SharedLoop(
    Images, lambda config: f"{config.train.global_batch} pictures", name=lambda config: "pictures"
)
APPLICATION = Application(
    "images",
    Config,
    check,
    LOOP.train,
    LOOP.plan,
    lambda: training_page("images"),
)
