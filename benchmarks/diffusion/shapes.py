"""Trains `cai train sd-shapes`, draws pictures for captions it has not seen, and counts which of them are as told.

    python benchmarks/diffusion/shapes.py --out shapes.json [--set train.steps=3000]

A checker learns, from renders alone, what lies at each of the nine places of a picture; its own error on renders it has
not seen is reported beside. The pictures agree where colour, kind and place of every shape of the caption are found.
The Frechet distance is between features of the checker: of pictures and renders, and of renders and other renders.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cai_apps.applications.diffusion.data.shapes import COLOURS, KINDS, PLACES, SIZES, Shapes
from cai_apps.applications.diffusion.sample import Options, grid, open_sampler

SIDE, CELL = 64, 22
HEADS = (len(COLOURS) + 1, len(KINDS) + 1, len(SIZES) + 1)
FEATURES = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="values of the recipe")
    parser.add_argument("--run", type=Path, default=Path("runs/sd-shapes"))
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20, help="denoising steps")
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--checker-steps", type=int, default=1500)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


class Checker(nn.Module):
    """Pictures [n, 3, 64, 64] in [0, 1] -> scores of colour, kind and size at each place, each [n, 9, choices]."""

    def __init__(self):
        super().__init__()
        widths = (3, 32, 64, 64)
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in itertools.pairwise(widths)
        ]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4, FEATURES), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(FEATURES, choices) for choices in HEADS)

    def features(self, pictures: Tensor) -> Tensor:
        """[n, 9, FEATURES]"""
        side = 3 * CELL
        scaled = nn.functional.interpolate(pictures, (side, side), mode="bilinear", antialias=True)
        cells = scaled.unfold(2, CELL, CELL).unfold(3, CELL, CELL).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        return self.layers(cells).view(len(pictures), 9, FEATURES)

    def forward(self, pictures: Tensor) -> list[Tensor]:
        found = self.features(pictures)
        return [head(found) for head in self.heads]


def told(source: Shapes, numbers: range) -> Tensor:
    """int64 [n, 9, 3]: colour, kind and size at each place, 0 where nothing is."""
    found = torch.zeros(len(numbers), 9, 3, dtype=torch.int64)
    for row, number in enumerate(numbers):
        for shape in source.scene(number):
            named = (
                list(COLOURS).index(shape.colour),
                KINDS.index(shape.kind),
                list(SIZES).index(shape.size),
            )
            found[row, PLACES.index(shape.place)] = torch.tensor(named) + 1
    return found


def renders(source: Shapes, numbers: range, device: torch.device) -> Tensor:
    """uint8 [n, 3, 64, 64]"""
    pictures = np.stack([source.image(number) for number in numbers])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous().to(device)


def train_checker(steps: int, device: torch.device) -> tuple[Checker, float]:
    """A checker, and the share of renders of which it gets all nine places right."""
    torch.manual_seed(0)
    source, count = Shapes(0, SIDE, seed=1), 12000
    pictures, answers = renders(source, range(count), device), told(source, range(count)).to(device)
    checker = Checker().to(device).train()
    optimizer = torch.optim.AdamW(checker.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(count, (256,), device=device)
        noisy = pictures[rows].float() / 255
        noisy = (noisy + 0.04 * torch.randn_like(noisy) * torch.rand(256, 1, 1, 1, device=device)).clamp(0, 1)
        scores = checker(noisy)
        loss = sum(
            nn.functional.cross_entropy(s.flatten(0, 1), answers[rows][..., i].flatten())
            for i, s in enumerate(scores)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    checker.eval()
    held_out = range(count, count + 2000)
    right = read(checker, renders(source, held_out, device)).cpu() == told(source, held_out)
    return checker, right.flatten(1).all(1).double().mean().item()


@torch.no_grad()
def read(checker: Checker, pictures: Tensor) -> Tensor:
    """int64 [n, 9, 3]: what the checker sees."""
    return torch.stack([scores.argmax(-1) for scores in checker(pictures.float() / 255)], -1)


def agreement(seen: Tensor, expected: Tensor) -> dict[str, float]:
    """Shares of shapes and of pictures that are as told."""
    there = expected[..., 0] > 0
    alike = seen == expected
    named = alike[..., :2].all(-1)
    return {
        "shapes": named[there].double().mean().item(),
        "shapes_with_size": alike.all(-1)[there].double().mean().item(),
        "pictures": (named | ~there).all(1).double().mean().item(),
        "pictures_and_nothing_else": named.all(1).double().mean().item(),
    }


@torch.no_grad()
def frechet(checker: Checker, one: Tensor, other: Tensor) -> float:
    """Distance of two sets of pictures as normal distributions of features (Heusel et al., arXiv:1706.08500)."""
    means, covariances = [], []
    for pictures in (one, other):
        found = checker.features(pictures.float() / 255).flatten(1).double()
        means.append(found.mean(0))
        covariances.append(found.T.cov())
    values = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0)
    apart = (means[0] - means[1]).square().sum()
    return (apart + covariances[0].trace() + covariances[1].trace() - 2 * values.sqrt().sum()).item()


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    flags = [f"--{key}={value}" for key, _, value in (text.partition("=") for text in options.set)]
    command = [
        sys.executable,
        "-m",
        "cai_apps",
        "train",
        "sd-shapes",
        f"--log.directory={options.run}",
        *flags,
    ]
    subprocess.run(command, check=True)
    trained = time.perf_counter() - started
    unseen, numbers = Shapes(0, SIDE, seed=2), range(options.pictures)
    started = time.perf_counter()
    sampler = open_sampler(options.run / "export")
    drawing = Options(steps=options.steps, guidance=options.guidance)
    pictures = sampler.in_batches([unseen.caption(n) for n in numbers], drawing, batch=256)
    drawn = time.perf_counter() - started
    checker, accuracy = train_checker(options.checker_steps, device)
    shown = torch.from_numpy(pictures).permute(0, 3, 1, 2).to(device)
    real, others = (renders(Shapes(0, SIDE, seed=s), range(2000), device) for s in (3, 4))
    records = [json.loads(line) for line in (options.run / "metrics.jsonl").read_text().splitlines()]
    speeds = sorted(record["images_per_second"] for record in records[20:] or records)
    result = {
        "train_seconds": trained,
        "sample_seconds": drawn,
        "images_per_second": speeds[len(speeds) // 2],
        "peak_gib": max(record["memory_bytes"] for record in records) / 2**30,
        "loss": records[-1]["loss"],
        "checker_accuracy": accuracy,
        "agreement": agreement(read(checker, shown).cpu(), told(unseen, numbers)),
        "frechet": frechet(checker, shown, real),
        "frechet_renders": frechet(checker, real, others),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "command": " ".join(["python benchmarks/diffusion/shapes.py", *sys.argv[1:]]),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        from PIL import Image

        options.out.write_text(json.dumps(result, indent=1) + "\n")
        Image.fromarray(grid(pictures[:64], 8)).save(options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
