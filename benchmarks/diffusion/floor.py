"""What a training step's convolutions, products and attentions take by themselves: a floor under its seconds.

    python benchmarks/diffusion/floor.py sd-v1 --batch 32 --out floor.jsonl
    python benchmarks/diffusion/floor.py sd-v1-tiny --batch 2

The denoiser of a recipe runs forward and backward once, in eager code, in the recipe's dtype of computation, a UNet
with channels last. Each of these operators is timed where it is called, on its own arguments and with nothing beside
it, once for each of its shapes: the median of `--repeats` calls. The floor is the sum over all calls. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from train import batches

from cai_apps import recipes
from cai_apps.applications.diffusion.model.design import load_design
from cai_apps.applications.diffusion.model.noise_process import process_of
from cai_apps.applications.diffusion.task import DIFFUSION
from cai_kernels.attention.choice import order

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
KINDS = {
    "convolution": "convolutions", "convolution_backward": "convolutions",
    "mm": "products", "addmm": "products", "bmm": "products", "baddbmm": "products",
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, help="file to append to")
    return parser.parse_args()


def kind_of(operator: Any) -> str | None:
    name = operator.overloadpacket.__name__
    return "attentions" if name.startswith("_scaled_dot_product") else KINDS.get(name)


def seconds_of(run: Callable[[], Any], repeats: int, on_gpu: bool) -> float:
    """The median of some calls; an event after each, so that the host keeps ahead."""
    for _ in range(3 if on_gpu else 0):
        run()
    found = []
    for _ in range(repeats):
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            found.append((start, end))
        else:
            began = time.perf_counter()
            run()
            found.append(time.perf_counter() - began)
    if on_gpu:
        torch.cuda.synchronize()
        found = [start.elapsed_time(end) / 1e3 for start, end in found]
    return statistics.median(found)


class Timed(TorchDispatchMode):
    """Times the operators of a kind, each shape once."""

    def __init__(self, repeats: int, on_gpu: bool):
        super().__init__()
        self._repeats, self._on_gpu = repeats, on_gpu
        self._known: dict[tuple, float] = {}
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, kind_of(func)
        if kind is not None:
            key = (func, *map(_shape, (*args, *kwargs.values())))
            if key not in self._known:
                self._known[key] = seconds_of(lambda: func(*args, **kwargs), self._repeats, self._on_gpu)
            self.seconds[kind] += self._known[key]
            self.calls[kind] += 1
        return func(*args, **kwargs)


def _shape(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else str(value)


def main() -> None:
    import diffusers

    options = arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    changes = {
        "train.global_batch": options.batch,
        "train.microbatch_size": options.batch,
        "parallel.shard": 1,
    }
    config = DIFFUSION.resolve(recipes.load(options.recipe, changes), 1)
    if config.model.text_encoder == "trained":
        config = replace(config, model=replace(config.model, text_encoder="frozen"))
    design, dtype = load_design(config.model.name), DTYPES[config.precision.compute]
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with torch.device(device):
        model = (
            getattr(diffusers, design.denoiser["_class_name"]).from_config(dict(design.denoiser)).to(dtype)
        )
    unet = hasattr(model, "up_blocks")
    if unet:
        model.to(memory_format=torch.channels_last)
    batch = batches(config, design, False, device)(0)
    process = process_of(design.scheduler, min_snr=config.objective.min_snr)
    moment = process.time(batch["u"])
    noisy = batch["mean"].to(dtype, memory_format=torch.channels_last if unet else torch.preserve_format)
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    with Timed(options.repeats, on_gpu) as timed, sdpa_kernel(order(device), set_priority=True):
        found = model(**design.family.takes(noisy, moment, batch), return_dict=False)[0]
        found.float().square().mean().backward()
    row = {
        "recipe": options.recipe, "batch": options.batch, "floor_seconds": round(sum(timed.seconds.values()), 5),
        "seconds": {kind: round(value, 5) for kind, value in timed.seconds.items()}, "calls": dict(timed.calls),
        "torch": torch.__version__, "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    if options.out:
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
