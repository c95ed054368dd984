"""Steps of a recipe's training session on random tokens: tokens a second and GPU, peak memory, losses; one JSON line.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/session.py llama-8b \
        --set parallel.tensor.size=2 parallel.shard=1 train.microbatch_size=2 train.global_batch=2

What is built is what `cai train` builds (`cai_apps.compose.apply`); data, logging and checkpoints are left out.
`turns.py` compares two versions with it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from cai_apps import recipes
from cai_apps.applications.language.task import LANGUAGE, workload
from cai_apps.compose.apply import apply
from cai_apps.compose.models import load_model_config


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="values of the recipe")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--text", action="store_true", help="bytes of Python's standard library, not random tokens"
    )
    parser.add_argument(
        "--imaginary", type=int, default=0, metavar="RANKS",
        help="this process stands for the first of so many: what it computes and keeps, without communication",
    )  # fmt: skip
    parser.add_argument("--form", default="", help="name of this run in the output")
    parser.add_argument("--out", type=Path, help="file to append to")
    return parser.parse_args()


def value(text: str):
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def corpus() -> torch.Tensor:
    """Bytes of the standard library's sources, in a fixed order."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


class Batches:
    """Microbatches of a step for this data rank."""

    def __init__(self, config, vocabulary: int, device: torch.device, rank: int, text: torch.Tensor | None):
        self._config, self._vocabulary, self._device = config, vocabulary, device
        self._rank, self._text = rank, text

    def of(self, step: int) -> list[dict[str, torch.Tensor]]:
        train, length = self._config.train, self._config.data.sequence_length
        ranks = self._config.parallel.replicate * self._config.parallel.shard
        gen = torch.Generator().manual_seed(1000 * train.seed + step)
        if self._text is None:
            ids = torch.randint(0, self._vocabulary, (train.global_batch, length), generator=gen)
        else:
            starts = torch.randint(0, len(self._text) - length, (train.global_batch,), generator=gen)
            ids = torch.stack([self._text[start : start + length] for start in starts])
        mine = ids.chunk(ranks)[self._rank].to(self._device)
        return [{"input_ids": part, "labels": part} for part in mine.split(train.microbatch_size)]


def main() -> None:
    options = arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if options.imaginary:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.imaginary)
    else:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    config = recipes.load(
        options.recipe, {k: value(v) for k, _, v in (s.partition("=") for s in options.set)}
    )
    model = load_model_config(config.model.name)
    config = LANGUAGE.resolve(config, dist.get_world_size())
    session = apply(config, workload(config, model), device=device)
    names = ("dp_replicate", "dp_shard")
    place = dict(zip(session.mesh.mesh_dim_names, session.mesh.get_coordinate(), strict=True))
    rank = place[names[0]] * config.parallel.shard + place[names[1]]
    batches = Batches(config, model.vocab_size, device, rank, corpus() if options.text else None)
    total = config.train.global_batch * (config.data.sequence_length - 1)
    seconds, losses, norms = [], [], []
    for step in range(options.warmup + options.steps):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss, norm = session.step(batches.of(step), total=total), session.norm()
        session.update(config.optimizer.lr, norm)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        dist.all_reduce(loss, group=session.mesh.get_group("dp_shard"))
        losses.append(round(float(loss), 5))
        norms.append(round(float(norm), 4))
    timed = seconds[options.warmup :]
    middle = statistics.median(timed)
    tokens = config.train.global_batch * config.data.sequence_length
    if dist.get_rank() == 0:
        row = {
            "form": options.form, "recipe": options.recipe, "set": options.set, "ranks": dist.get_world_size(),
            "tokens_per_second_per_gpu": round(tokens / middle / dist.get_world_size(), 1),
            "step_seconds": round(middle, 4), "spread": [round(pick(timed), 4) for pick in (min, max)],
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
            "losses": losses, "norms": norms[:3], "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
