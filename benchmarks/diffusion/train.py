"""Training steps of a diffusion recipe: ours, plain diffusers, diffusers compiled; one JSON line a form.

    python benchmarks/diffusion/train.py sd-v1 --form ours --batch 32 --out steps.jsonl
    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/diffusion/train.py sd-v2 --form ours \
        --batch 16 --set parallel.shard=-1 parallel.zero=2

`ours` is the session that `cai train` builds of the recipe (`cai_apps.compose.apply`). `plain` is a loop as diffusers'
examples have it: fp32 weights, bf16 autocast, torch's AdamW, its EMAModel; `fp32` is that without autocast. `compiled`
is `plain` in channels-last, as one graph by torch.compile. All learn from the same kind of random latents and
embeddings; data, logging and checkpoints are left out. `--batch` counts images of a GPU; only `ours` runs on several,
as data ranks. `--encoders` adds an autoencoder in bf16, run at every step; the peers run the text encoder too, ours
embeds captions once. A step's seconds are from the end of one to the end of the next on the device, and no loop waits
longer than it must: ours reads the loss and the norm of each step, as `cai train` does, the peers none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cai_apps import recipes
from cai_apps.applications.diffusion.model.captions import embed
from cai_apps.applications.diffusion.model.design import T5_LENGTH, Design, load_design
from cai_apps.applications.diffusion.model.encoders import load_autoencoder, load_texts
from cai_apps.applications.diffusion.model.noise_process import process_of
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_apps.applications.diffusion.training.flops import image_flops
from cai_apps.applications.diffusion.training.workload import workload
from cai_apps.compose.apply import apply
from cai_apps.run.loop.training_loop import reading
from cai_apps.run.train import settle

Step = Callable[[dict[str, Tensor]], Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--form", choices=("ours", "plain", "fp32", "compiled"), required=True)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="values of the recipe, ours alone"
    )
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--encoders", action="store_true", help="pixels, not latents")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4, help="steps that are not timed, 1 or more")
    parser.add_argument("--profile", type=Path, help="table of the kernels of two steps")
    parser.add_argument("--out", type=Path, help="file to append to")
    return parser.parse_args()


def value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def batches(
    config: Any, design: Design, encoders: bool, device: torch.device
) -> Callable[[int], dict[str, Tensor]]:
    """By step: what a rank reads of its data."""
    size, n = config.data.size, config.train.global_batch // dist.get_world_size()
    family, denoiser, length = design.family, design.denoiser, design.text_length
    side = size // design.factor

    def of(step: int) -> dict[str, Tensor]:
        piece = step * dist.get_world_size() + dist.get_rank()
        gen = torch.Generator(device).manual_seed(piece)
        rand: dict[str, Any] = {"generator": gen, "device": device}
        found = {
            "position": torch.arange(piece * n, (piece + 1) * n, device=device),
            "u": torch.rand(n, dtype=torch.float64, **rand),
        }
        if encoders:
            found["pixels"] = torch.randint(256, (n, 3, size, size), dtype=torch.uint8, **rand)
        else:
            found["mean"] = torch.randn(n, design.channels, side, side, **rand)
            if design.autoencoder is not None:
                found["std"] = torch.full_like(found["mean"], 0.1)
        if family.condition == "label":
            return found | {"label": torch.randint(denoiser["num_embeds_ada_norm"], (n,), **rand)}
        if config.model.text_encoder == "trained":
            return found | {"tokens": torch.randint(2, 400, (n, len(design.texts), length), **rand)}
        if "pooled" in family.widths:
            length_all = length + T5_LENGTH
            found["pooled"] = torch.randn(n, denoiser[family.widths["pooled"]], **rand)
        else:
            length_all = length
        if encoders:
            found["tokens"] = torch.randint(2, 400, (n, len(design.texts), length), **rand)
        return found | {"text": torch.randn(n, length_all, denoiser[family.widths["text"]], **rand)}

    return of


def ours(config: Any, device: torch.device) -> Step:
    session = apply(config, workload(config, load_design(config.model.name), device), device=device)

    def step(batch: dict[str, Tensor]) -> Tensor:
        if config.model.text_encoder == "frozen":
            batch = {name: value for name, value in batch.items() if name != "tokens"}
        parts = _microbatches(batch, config.train.microbatch_size)
        loss, norm = session.step(parts, total=config.train.global_batch), session.norm()
        read = reading([loss, norm], device)
        session.update(config.optimizer.lr, norm)
        read()
        return loss

    return step


def _microbatches(batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    parts = {name: value.split(size) for name, value in batch.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def peer(config: Any, design: Design, device: torch.device, *, form: str) -> Step:
    """A loop as those of diffusers' examples."""
    compiled = form == "compiled"
    import diffusers
    from diffusers.training_utils import EMAModel

    with torch.device(device):
        model = getattr(diffusers, design.denoiser["_class_name"]).from_config(dict(design.denoiser))
    model.train()
    if compiled:
        model.to(memory_format=torch.channels_last)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, betas=(0.9, config.optimizer.beta2)
    )
    average = EMAModel(model.parameters(), decay=config.optimizer.ema_decay)
    process = process_of(design.scheduler, min_snr=config.objective.min_snr)
    encode = _encoders(config, design, device)

    def step(batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            batch = encode(batch)
            clean = batch["mean"] + batch.get("std", 0.0) * torch.randn_like(batch["mean"])
            noise, time = torch.randn_like(clean), process.time(batch["u"])
            noisy, target = process.mix(clean, noise, time), process.target(clean, noise, time)
        if compiled:
            noisy = noisy.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=form != "fp32"):
            found = run(**design.family.takes(noisy, time, batch), return_dict=False)[0]
        error = (found.float()[:, : target.shape[1]] - target).square().flatten(1).mean(1)
        loss = (error * process.weight(time)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.step(model.parameters())
        return loss.detach()

    return step


def _encoders(
    config: Any, design: Design, device: torch.device
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    held: list[Any] = []

    def encode(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if "pixels" not in batch:
            return batch
        if not held:
            options: dict[str, Any] = {"seed": 0, "dtype": torch.bfloat16, "device": device}
            held.extend((load_autoencoder(design, **options), load_texts(design, **options)))
        vae, texts = held
        found = batch | vae.moments(batch["pixels"])
        return found | embed(design.family, design.denoiser, texts, batch["tokens"].unbind(1), torch.bfloat16)

    return encode


def main() -> None:
    options = arguments()
    on_gpu = torch.cuda.is_available()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    own = {k: value(v) for k, _, v in (s.partition("=") for s in options.set)}
    batch = {"train.global_batch": options.batch * ranks, "train.microbatch_size": options.batch}
    if "train.microbatch_size" in own:
        batch.pop("train.microbatch_size")
    encoded = {"data.latents": "encoded"} if options.encoders else {}
    config = DIFFUSION.resolve(recipes.load(options.recipe, {**batch, **encoded, **own}), ranks)
    if options.form == "ours":
        config = settle(DIFFUSION, config, ranks, device.type)
    design = load_design(config.model.name)
    torch.manual_seed(0)
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", **(alone if ranks == 1 else {}))
    built = time.perf_counter()
    if options.form == "ours":
        step = ours(config, device)
    else:
        step = peer(config, design, device, form=options.form)
    data = batches(config, design, options.encoders, device)
    losses, ends, first = [], [], 0.0
    for number in range(options.warmup + options.steps):
        losses.append(step(data(number)))
        ends.append(_now(on_gpu))
        if number == 0:
            float(losses[0])
            first = time.perf_counter() - built
    seconds = _between(ends[options.warmup - 1 :])
    losses = [round(float(loss), 5) for loss in losses[:6]]
    if options.profile:
        _profile(step, data, options.profile)
    middle = statistics.median(seconds)
    row = {
        "form": options.form, "recipe": options.recipe, "set": options.set, "batch": options.batch,
        "ranks": ranks, "encoders": options.encoders,
        "images_per_second_per_gpu": round(options.batch / middle, 2),
        "step_seconds": round(middle, 5), "spread": [round(pick(seconds), 5) for pick in (min, max)],
        "first_step_seconds": round(first, 1),
        "tflops": round(image_flops(config, design) * options.batch / middle / 1e12, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        "losses": losses, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }  # fmt: skip
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def _now(on_gpu: bool) -> float | torch.cuda.Event:
    """The end of what the device has been given; the host does not wait."""
    if not on_gpu:
        return time.perf_counter()
    end = torch.cuda.Event(enable_timing=True)
    end.record()
    return end


def _between(ends: list) -> list[float]:
    """Seconds from each end to the next."""
    if not isinstance(ends[0], torch.cuda.Event):
        return [after - before for before, after in itertools.pairwise(ends)]
    ends[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(ends)]


def _profile(step: Step, data: Callable[[int], dict[str, Tensor]], file: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    batch = data(1000)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            step(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    averages = found.key_averages()
    wide = {"row_limit": 60, "max_name_column_width": 90}
    host = averages.table(sort_by="self_cpu_time_total", **wide)
    file.write_text(averages.table(sort_by=by, **wide) + "\n\n" + host)


if __name__ == "__main__":
    main()
