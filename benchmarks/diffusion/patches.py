"""One large picture on one GPU and in strips on all of them; one JSON file.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/diffusion/patches.py --out patches.json
    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/diffusion/patches.py \
        --preset sd3-tiny --size 64 --steps 2 --out patches.json

A pipeline of the preset's shape is written with random weights. `one` is the whole picture on each GPU by itself.
`branches` is what `cai generate --patches exact` does on an even number of ranks: half of them predict without the
prompt. `exact` and `stale` make strips of both predictions. `denoising_seconds` is of the denoiser's steps,
`drawing_seconds` also of the autoencoder, which every rank runs on the whole picture. `difference` is of latents from
those of `one`, in their norms.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sampling import PROMPT, write
from torch import Tensor

from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.sampling.sampler import Sampler
from cai_apps.applications.diffusion.sampling.scheduler import Options

FORMS = ("one", "branches", "exact", "stale")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="sd3", help="a preset whose shape is used, with random weights")
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="exact steps before stale ones")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--forms", nargs="*", default=FORMS, choices=FORMS)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def measure(sampler: Sampler, drawing: Options, repeats: int) -> tuple[dict[str, Any], Tensor]:
    on_gpu = sampler.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    latents = sampler.latents([PROMPT], drawing)
    denoising, whole = [], []
    for _ in range(repeats):
        dist.barrier()
        sampler.latents([PROMPT], drawing)
        denoising.append(sampler.seconds)
        sampler.pictures([PROMPT], drawing)
        whole.append(sampler.seconds)
    row = {
        "denoising_seconds": round(statistics.median(denoising), 4),
        "drawing_seconds": round(statistics.median(whole), 4),
        "spread": [round(pick(denoising), 4) for pick in (min, max)],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
    }
    return row, latents


def main() -> None:
    options, on_gpu = arguments(), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    first = dist.get_rank() == 0
    drawing, design = Options(options.size, options.steps), load_design(options.preset)
    home = Path(tempfile.gettempdir()) / f"patches-{os.environ['MASTER_PORT']}"
    started = time.perf_counter()
    if first:
        write(design, home, device)
        print(f"written in {time.perf_counter() - started:.0f} s", flush=True)
    dist.barrier()
    rows, plain = [], None
    for form in options.forms:
        gc.collect()
        dtype = torch.bfloat16 if on_gpu else torch.float32
        sampler = Sampler(home, device=device, dtype=dtype)
        if form != "one":
            mode = "stale" if form == "stale" else "exact"
            sampler.split(dist.group.WORLD, mode=mode, warmup=options.warmup, branches=form == "branches")
        row, latents = measure(sampler, drawing, options.repeats)
        plain = latents if form == "one" else plain
        if plain is not None:
            row["difference"] = round(float((latents - plain).norm() / plain.norm()), 6)
        rows.append({"form": form, **row})
        if first:
            print(json.dumps(rows[-1]), flush=True)
    told = {
        "preset": options.preset, "size": options.size, "steps": options.steps, "warmup": options.warmup,
        "ranks": dist.get_world_size(), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu", "forms": rows,
    }  # fmt: skip
    if first:
        options.out.write_text(json.dumps(told, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
