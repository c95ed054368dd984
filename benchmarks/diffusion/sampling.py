"""Peak memory and seconds of pictures: ways of `loading.Memory` beside plain diffusers; one JSON file.

    python benchmarks/diffusion/sampling.py --out sampling.json
    python benchmarks/diffusion/sampling.py --preset sd-v1-tiny --size 32 --steps 2 --out sampling.json

A pipeline of the preset's shape is written with random weights, or `--directory` names one. Each form draws the same
prompts, from text to pixels, in the same process: once to warm up, then `--repeats` times. What a process pays once
(imports, libraries of the GPU, files that come into the cache of the system) is paid before, by a short drawing of ours
and of diffusers, so `first_call_seconds` is of loading and of one call. Peak memory counts all of it. The file is
written after each form. `diffusers` is its own pipeline with all parts on the device; `diffusers-offload` calls
`enable_model_cpu_offload`, `diffusers-layers` `enable_sequential_cpu_offload`, `diffusers-tiled` `enable_vae_tiling`.
`seconds_a_picture` is of the whole call, ours with each part on its way to the GPU; `drawing_seconds_a_picture` of
denoiser and autoencoder alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cai_apps.applications.diffusion.model.captions import train_tokenizer
from cai_apps.applications.diffusion.model.design import Design, load_design
from cai_apps.applications.diffusion.model.encoders import load_autoencoder, load_texts
from cai_apps.applications.diffusion.model.export import index_of
from cai_apps.applications.diffusion.model.loading import Memory
from cai_apps.applications.diffusion.sampling.sampler import Sampler
from cai_apps.applications.diffusion.sampling.scheduler import Options, make_scheduler

OURS = {
    "ours": Memory(vae="whole"),
    "ours-int8": Memory(weights="int8", vae="whole"),
    "ours-fp8": Memory(weights="fp8", vae="whole"),
    "ours-host": Memory(residency="host", vae="whole"),
    "ours-sliced": Memory(vae="sliced"),
    "ours-int8-sliced": Memory(weights="int8", vae="sliced"),
    "ours-fp8-sliced": Memory(weights="fp8", vae="sliced"),
    "ours-tiled": Memory(vae="tiled"),
    "ours-least": Memory(weights="int8", residency="host", vae="tiled"),
}
PEERS = ("diffusers", "diffusers-offload", "diffusers-layers", "diffusers-tiled")
GPU_ONLY = ("diffusers-offload", "diffusers-layers")
PROMPT = "a large red circle at the middle"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="sd-v1", help="a preset whose shape is used, with random weights")
    parser.add_argument("--directory", type=Path, help="a pipeline of diffusers, in place of a preset")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--forms", nargs="*", default=[*OURS, *PEERS], choices=[*OURS, *PEERS])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def write(design: Design, home: Path, device: torch.device) -> None:
    """A pipeline of a design with random weights in bf16, drawn on a device."""
    import diffusers

    how: dict[str, Any] = {"seed": 0, "dtype": torch.bfloat16, "device": device}
    torch.manual_seed(0)
    kind = getattr(diffusers, design.denoiser["_class_name"])
    with device:
        denoiser = kind.from_config(dict(design.denoiser)).to(torch.bfloat16)
    denoiser.save_pretrained(home / design.family.folder)
    del denoiser
    autoencoder = load_autoencoder(design, **how)
    if autoencoder.model is not None:
        autoencoder.model.save_pretrained(home / "vae")
    for suffix, text in zip(("", "_2", "_3"), load_texts(design, **how), strict=False):
        text.save_pretrained(home / f"text_encoder{suffix}")
        tokenizer = train_tokenizer([PROMPT], 400)
        tokenizer.model_max_length = design.text_length
        tokenizer.save_pretrained(home / f"tokenizer{suffix}")
    scheduler = getattr(diffusers, design.scheduler["_class_name"]).from_config(dict(design.scheduler))
    scheduler.save_pretrained(home / "scheduler")
    (home / "model_index.json").write_text(json.dumps(index_of(design)))


def ours(home: Path, memory: Memory, drawing: Options, device: torch.device) -> Callable[[int], Any]:
    if load_design(str(home)).autoencoder is None:
        memory = replace(memory, vae="auto")
    sampler = Sampler(home, device=device, dtype=torch.bfloat16, memory=memory)

    def draw(count: int) -> tuple[np.ndarray, float]:
        found = sampler.in_batches([PROMPT] * count, drawing, batch=count)
        return found, sampler.seconds

    return draw


def peer(home: Path, form: str, drawing: Options, device: torch.device) -> Callable[[int], Any]:
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(home, torch_dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = make_scheduler(load_design(str(home)), drawing)
    if form == "diffusers-offload":
        pipeline.enable_model_cpu_offload()
    elif form == "diffusers-layers":
        pipeline.enable_sequential_cpu_offload()
    else:
        pipeline.to(device)
    if form == "diffusers-tiled":
        pipeline.vae.enable_tiling()
        pipeline.vae.enable_slicing()

    def draw(count: int) -> tuple[np.ndarray, float | None]:
        size = {"height": drawing.size, "width": drawing.size}
        steps = {"num_inference_steps": drawing.steps, "guidance_scale": drawing.guidance}
        found = pipeline([PROMPT] * count, output_type="np", **size, **steps).images
        return (found * 255).round().astype(np.uint8), None

    return draw


def measure(
    make: Callable[[], Callable[[int], Any]], options: argparse.Namespace, on_gpu: bool
) -> dict[str, Any]:
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    draw = make()
    draw(options.batch)
    first, seconds, drawing, pictures = time.perf_counter() - started, [], [], None
    for _ in range(options.repeats):
        started = time.perf_counter()
        pictures, inside = draw(options.batch)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        drawing.append(inside)
    inner = None if drawing[0] is None else round(statistics.median(drawing) / options.batch, 4)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return {
        "peak_gib": None if peak is None else round(peak, 3),
        "seconds_a_picture": round(statistics.median(seconds) / options.batch, 4),
        "drawing_seconds_a_picture": inner,
        "first_call_seconds": round(first, 2),
        "spread": [round(pick(seconds) / options.batch, 4) for pick in (min, max)],
        "pictures": pictures,
    }


def works(form: str, design: Design, on_gpu: bool) -> bool:
    """Diffusers offloads to a GPU alone, and has no pipelines of pixels; those have nothing to decode."""
    if design.autoencoder is None and (form in PEERS or OURS[form].vae != "whole"):
        return False
    return on_gpu or form not in GPU_ONLY


def draws(form: str, home: Path, drawing: Options, device: torch.device) -> Callable[[int], Any]:
    """What draws so many pictures in one form."""
    return ours(home, OURS[form], drawing, device) if form in OURS else peer(home, form, drawing, device)


def main() -> None:
    options, on_gpu = arguments(), torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    drawing = Options(options.size, options.steps)
    design = load_design(str(options.directory or options.preset))
    rows: list[dict[str, Any]] = []
    told = {
        "model": str(options.directory or options.preset), "size": options.size, "steps": options.steps,
        "batch": options.batch, "dtype": "bfloat16", "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu", "forms": rows,
    }  # fmt: skip
    plain = None
    with tempfile.TemporaryDirectory() as scratch:
        home = options.directory or Path(scratch)
        if options.directory is None:
            write(design, home, device)
        for form in ("ours", "diffusers"):
            if works(form, design, on_gpu):
                draws(form, home, replace(drawing, steps=min(options.steps, 2)), device)(options.batch)
        for form in options.forms:
            if not works(form, design, on_gpu):
                continue
            row = measure(lambda form=form: draws(form, home, drawing, device), options, on_gpu)
            pictures = row.pop("pictures").astype(float)
            plain = pictures if form == "ours" else plain
            if form in OURS and plain is not None:
                row["mean_difference_of_bytes"] = round(float(np.abs(pictures - plain).mean()), 3)
            rows.append({"form": form, **row})
            print(json.dumps(rows[-1]), flush=True)
            options.out.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
