"""Trains `cai train sd-shapes`, draws pictures for captions it has not seen, and counts which of them are as told.

    python benchmarks/diffusion/shapes.py --out shapes.json [--set train.steps=3000]

A checker learns, from renders alone, what lies at each of the nine places of a picture; its own error on renders it has
not seen is reported beside. The pictures agree where colour, kind and place of every shape of the caption are found.
The Frechet distance is between features of the checker: of pictures and renders, and of renders and other renders.
The same captions are drawn with weights in 8 bits, too. Then the trained model learns a subject (DreamBooth), once at
each of the rates.
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

from cai_apps.applications.diffusion.config import Data
from cai_apps.applications.diffusion.data.shapes import COLOURS, KINDS, PLACES, SIZES, Shapes
from cai_apps.applications.diffusion.data.sources import source_of
from cai_apps.applications.diffusion.model.loading import EVERYTHING, Memory
from cai_apps.applications.diffusion.sampling.sampler import grid, open_sampler
from cai_apps.applications.diffusion.sampling.scheduler import Options

SIDE, CELL = 64, 22
HEADS = (len(COLOURS) + 1, len(KINDS) + 1, len(SIZES) + 1)
FEATURES = 32
CAPTION = "a flower"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="values of the recipe")
    parser.add_argument("--run", type=Path, default=Path("runs/sd-shapes"))
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20, help="denoising steps")
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--checker-steps", type=int, default=1500)
    parser.add_argument("--subject-steps", type=int, default=400, help="of DreamBooth on it; 0: none")
    parser.add_argument("--subject-lrs", type=float, nargs="+", default=[1e-4, 5e-5], help="a run each")
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


def cai(*words: object) -> float:
    """Runs `cai`; seconds."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "cai_apps", *map(str, words)], check=True)
    return time.perf_counter() - started


def drawing_of(options: argparse.Namespace) -> Options:
    return Options(steps=options.steps, guidance=options.guidance)


def stacked(pictures: np.ndarray, device: torch.device) -> Tensor:
    """Pictures [n, height, width, 3] as uint8 [n, 3, height, width]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).to(device)


def base(options: argparse.Namespace, checker: Checker, device: torch.device) -> tuple[dict, np.ndarray]:
    """Trains the recipe and draws captions it has not seen, then again with weights in 8 bits."""
    flags = [f"--{text}" for text in options.set]
    trained = cai("train", "sd-shapes", f"--log.directory={options.run}", *flags)
    unseen, numbers = Shapes(0, SIDE, seed=2), range(options.pictures)
    captions, expected = [unseen.caption(n) for n in numbers], told(unseen, numbers)
    real, others = (renders(Shapes(0, SIDE, seed=s), range(2000), device) for s in (3, 4))

    def drawn(memory: Memory) -> tuple[dict, np.ndarray]:
        started = time.perf_counter()
        sampler = open_sampler(options.run / "export", memory=memory)
        pictures = sampler.in_batches(captions, drawing_of(options), batch=256)
        seconds, shown = time.perf_counter() - started, stacked(pictures, device)
        return {
            "sample_seconds": seconds,
            "agreement": agreement(read(checker, shown).cpu(), expected),
            "frechet": frechet(checker, shown, real),
        }, pictures

    plain, pictures = drawn(EVERYTHING)
    small = {}
    for kind in ("int8", "fp8"):
        small[kind], near = drawn(Memory(weights=kind))
        off = np.abs(near.astype(int) - pictures)
        small[kind]["mean_difference_of_bytes"] = float(off.mean())
    records = [json.loads(line) for line in (options.run / "metrics.jsonl").read_text().splitlines()]
    speeds = sorted(record["images_per_second"] for record in records[20:] or records)
    return {
        "train_seconds": trained,
        "steps": records[-1]["step"],
        "images_per_second": speeds[len(speeds) // 2],
        "peak_gib": max(record["memory_bytes"] for record in records) / 2**30,
        "loss": records[-1]["loss"],
        **plain,
        "frechet_renders": frechet(checker, real, others),
        **small,
    }, pictures


def class_pictures(options: argparse.Namespace) -> Path:
    """A folder of 200 pictures of the base's own, with their captions."""
    from PIL import Image

    home, known = options.run.parent / "class", Shapes(0, SIDE, seed=5)
    home.mkdir(parents=True, exist_ok=True)
    captions = [known.caption(n) for n in range(200)]
    pictures = open_sampler(options.run / "export").in_batches(captions, drawing_of(options), batch=200)
    for n, picture in enumerate(pictures):
        Image.fromarray(picture).save(home / f"{n:03d}.png")
        (home / f"{n:03d}.txt").write_text(captions[n], encoding="utf-8")
    return home


def learn(options: argparse.Namespace, prior: Path, rate: float) -> tuple[Path, float]:
    """DreamBooth at one rate: the run, and its seconds."""
    run = options.run.parent / f"subject-{rate:g}"
    flags = {
        "model.name": options.run / "export", "data.source": "flower", "data.size": SIDE, "data.caption": CAPTION,
        "objective.prediction": "v", "data.encoder_dtype": "fp32",
        "prior.images": 200, "prior.source": prior, "prior.prompt": "", "optimizer.lr": rate,
        "train.steps": options.subject_steps, "train.global_batch": 32, "train.microbatch_size": 32,
        "train.compile": "off", "sampling.every": 0, "sampling.prompts": "[]", "log.directory": run,
    }  # fmt: skip
    return run, cai("train", "dreambooth", *(f"--{name}={value}" for name, value in flags.items()))


def subject(options: argparse.Namespace, checker: Checker, device: torch.device) -> tuple[dict, np.ndarray]:
    """DreamBooth of four crops of a photo on the trained base, beside pictures of the base's own, once at each rate.

    The similarity to the subject is the cosine between pictures and the crop most like them, of 16 x 16 pixels without
    their mean. The score of the prior is the agreement of 20 captions, eight pictures each. Returned are the crops, and
    pictures of the base and of the run that keeps most of the prior.
    """
    own = Shapes(0, SIDE, seed=6)
    prompts = [own.caption(n) for n in range(20) for _ in range(8)]
    expected = told(own, range(20)).repeat_interleave(8, 0)
    crops = source_of(Data(source="flower", size=SIDE))
    wanted = np.stack([crops.image(n) for n in range(crops.size)])

    def look(home: Path) -> tuple[dict[str, float], list[np.ndarray]]:
        sampler = open_sampler(home)
        shown = sampler.in_batches([CAPTION] * 32, drawing_of(options), batch=64)
        priors = sampler.in_batches(prompts, drawing_of(options), batch=160)
        score = agreement(read(checker, stacked(priors, device)).cpu(), expected)
        cpu = torch.device("cpu")
        return {"similarity": alike(stacked(shown, cpu), stacked(wanted, cpu)), **score}, [
            *shown[:8],
            *priors[::8][:8],
        ]

    before, rows = look(options.run / "export")
    prior, runs, found = class_pictures(options), [], []
    for rate in options.subject_lrs:
        run, seconds = learn(options, prior, rate)
        scores, pictures = look(run / "export")
        runs.append({"lr": rate, "seconds": seconds, **scores})
        found.append(pictures)
    best = max(range(len(runs)), key=lambda n: (runs[n]["pictures"], runs[n]["similarity"]))
    shown = np.stack([*wanted, *rows, *found[best]])
    return {"before": before, "runs": runs, "shown_lr": runs[best]["lr"]}, shown


def alike(pictures: Tensor, wanted: Tensor) -> float:
    """The mean over pictures of the cosine with the crop most like them."""

    def small(images: Tensor) -> Tensor:
        found = nn.functional.interpolate(images.double(), (16, 16), mode="area").flatten(1)
        return nn.functional.normalize(found - found.mean(1, keepdim=True), dim=1)

    return (small(pictures) @ small(wanted).T).max(1).values.mean().item()


def main() -> None:
    from PIL import Image

    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checker, accuracy = train_checker(options.checker_steps, device)
    result: dict[str, object] = {
        "checker_accuracy": accuracy,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "command": " ".join(["python benchmarks/diffusion/shapes.py", *sys.argv[1:]]),
    }
    parts = {"base": base} | ({"subject": subject} if options.subject_steps else {})
    for name, part in parts.items():
        result[name], pictures = part(options, checker, device)
        print(json.dumps(result[name], indent=1), flush=True)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            columns = 8 if name == "base" else 4
            shown = grid(pictures[:64], columns)
            Image.fromarray(shown).save(options.out.with_name(f"{options.out.stem}-{name}.png"))


if __name__ == "__main__":
    main()
