"""An embedding table 20 times the device budget, trained on ids that follow Zipf's law: hit rate and speed.

    python benchmarks/cached_embedding.py --budget 1GB --output benchmarks/results/cached-embedding.json
    python benchmarks/cached_embedding.py --tiny --device cpu

Forms: `cai_gemini.CachedEmbedding` with 1 to 10 % of the rows on the device, alone and with `lookahead`, and with
frequencies known in advance; torch's `EmbeddingBag(sparse=True)` in host memory whose result is copied to the device;
and FBGEMM's table batched embedding with a cache over unified memory (what torchrec places there), where it installs.
All train with row-wise Adagrad, on the same batches, under the same small MLP.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cai_gemini import CachedEmbedding, RowwiseAdagrad, lookahead
from cai_mesh.errors import CaiError

TIMES = 20
"""Table bytes for each byte of the budget."""
SCATTER = 2_654_435_761
"""A prime; multiplying by it spreads the frequent ids over the table."""
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}

Batch = tuple[torch.Tensor, torch.Tensor]  # ids [B, L] in host memory, targets [B]


@dataclass(frozen=True)
class Sizes:
    rows: int
    dim: int
    batch: int
    bag: int
    steps: int
    warmup: int


class Ids:
    """Batches of ids whose k-th most frequent one comes k^-alpha times as often as the first."""

    def __init__(self, sizes: Sizes, alpha: float):
        self.sizes = sizes
        self._law = torch.arange(1, sizes.rows + 1, dtype=torch.float64).pow_(-alpha)
        self._cumulative = self._law.cumsum(0)
        self._cumulative /= self._cumulative[-1].clone()

    def batches(self) -> list[Batch]:
        sizes, generator = self.sizes, torch.Generator().manual_seed(1)
        made = []
        for _ in range(sizes.warmup + sizes.steps):
            draws = torch.rand(sizes.batch * sizes.bag, dtype=torch.float64, generator=generator)
            rank = torch.searchsorted(self._cumulative, draws).clamp_(max=sizes.rows - 1)
            ids = self.spread(rank).view(sizes.batch, sizes.bag)
            made.append((ids, torch.rand(sizes.batch, generator=generator)))
        return made

    def spread(self, rank: torch.Tensor) -> torch.Tensor:
        return rank * SCATTER % self.sizes.rows

    def frequencies(self) -> torch.Tensor:
        """Of every id, [rows] int64; whole numbers need no ranking."""
        frequencies = torch.zeros_like(self._law)
        ranks = torch.arange(self.sizes.rows)
        frequencies.index_add_(0, self.spread(ranks), self._law)
        return frequencies.mul_(2**30).long()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train(
    look_up: Callable[[torch.Tensor], torch.Tensor],
    step: Callable[[], None],
    batches: Any,
    sizes: Sizes,
    device: torch.device,
    *,
    warm: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Iterations a second of forward, backward and update, after the warm-up; `warm` is called at its end."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(sizes.dim, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    dense = torch.optim.Adagrad(head.parameters(), lr=0.01)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    for number, (ids, target) in enumerate(batches):
        if number == sizes.warmup:
            warm()
            synchronize(device)
            start = time.perf_counter()
        loss = (head(look_up(ids)).squeeze(1) - target.to(device)).square().mean()
        loss.backward()
        step()
        dense.step()
        dense.zero_grad()
    synchronize(device)
    seconds = (time.perf_counter() - start) / sizes.steps
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"iterations_per_second": 1 / seconds, "peak_device_bytes": peak, "final_loss": loss.item()}


def run_cached(
    weight: torch.Tensor,
    batches: list[Batch],
    sizes: Sizes,
    device: torch.device,
    *,
    ahead: int,
    **options: Any,
) -> dict[str, Any]:
    module = CachedEmbedding(*weight.shape, device=device, mode="sum", weight=weight, **options)
    optimizer = RowwiseAdagrad(module.parameters(), lr=0.05)
    stream: Any = lookahead(batches, [module], lambda batch: [batch[0]], depth=ahead) if ahead else batches

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    found = train(module, step, stream, sizes, device, warm=module.reset_cache_stats)
    stats = module.cache_stats()
    counted = max(1, stats.batches)
    return found | {
        "hit_rate": stats.hit_rate,
        "rows_fetched_per_iteration": stats.fetched / counted,
        "bytes_in_per_iteration": stats.bytes_in / counted,
        "bytes_out_per_iteration": stats.bytes_out / counted,
        "prefetches_refused": stats.refused,
        "cache_device_bytes": module.device_bytes(),
    }


def run_host(
    weight: torch.Tensor, batches: list[Batch], sizes: Sizes, device: torch.device
) -> dict[str, Any]:
    module = nn.EmbeddingBag(*weight.shape, mode="sum", sparse=True, _weight=weight)
    optimizer = RowwiseAdagrad(module.parameters(), lr=0.05)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return train(lambda ids: module(ids).to(device), step, batches, sizes, device)


def run_fbgemm(batches: list[Batch], sizes: Sizes, device: torch.device, ratio: float) -> dict[str, Any]:
    """FBGEMM updates in its backward; its statistics of misses come from its own cache."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    spec = (sizes.rows, sizes.dim, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [spec], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.05, cache_load_factor=ratio
    )
    offsets = torch.arange(0, sizes.batch * sizes.bag + 1, sizes.bag, device=device)
    return train(lambda ids: module(ids.to(device).flatten(), offsets), lambda: None, batches, sizes, device)


def attempt(results: list[dict], form: str, run: Callable[[], dict[str, Any]], **settings: Any) -> None:
    """Run a form, print a line and keep the record; what a peer lacks or raises is recorded as its result."""
    try:
        found = run()
    except (ImportError, RuntimeError, OSError, CaiError) as error:
        found = {"failed": f"{type(error).__name__}: {error}"[:300]}
    results.append({"form": form, **settings, **found})
    speed = found.get("iterations_per_second")
    rate = found.get("hit_rate")
    told = f"{speed:8.2f} it/s" if speed else found["failed"].splitlines()[0]
    print(f"{form:24}{settings}  {told}{'' if rate is None else f'  hit rate {rate:.1%}'}", flush=True)


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "fbgemm-gpu", "torchrec"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", default="1GB", help=f"device budget; the table takes {TIMES} times this")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--bag", type=int, default=8, help="ids of an example")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--warmup", type=int, default=50, help="steps that fill the cache and are not counted"
    )
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.05, 1.2])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.01, 0.02, 0.05, 0.1])
    parser.add_argument("--ahead", type=int, default=1, help="batches that lookahead is ahead")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument(
        "--tiny", action="store_true", help="a dry run of seconds: a table of 4 MB, small batches"
    )
    options = parser.parse_args()
    if options.tiny:
        options.budget, options.dim, options.batch, options.bag = "200KB", 16, 64, 4
        options.steps, options.warmup = 10, 10
    return options


def measure(
    results: list[dict], weight: torch.Tensor, ids: Ids, alpha: float, options: argparse.Namespace
) -> None:
    """Every form on the same batches."""
    sizes, device = ids.sizes, torch.device(options.device)
    batches, frequencies = ids.batches(), ids.frequencies()
    distinct = sum(len(torch.unique(batch[0])) for batch in batches) / len(batches)
    print(f"alpha {alpha}: {distinct:,.0f} distinct of {sizes.batch * sizes.bag:,} ids a batch", flush=True)
    attempt(results, "torch on the host", partial(run_host, weight, batches, sizes, device), alpha=alpha)
    for ratio in options.ratios:
        about = {"alpha": alpha, "ratio": ratio}
        cached = partial(run_cached, weight, batches, sizes, device, cache=ratio)
        attempt(results, "cai", partial(cached, ahead=0), **about)
        attempt(results, "cai lookahead", partial(cached, ahead=options.ahead), **about)
        known = partial(cached, ahead=options.ahead, frequencies=frequencies)
        attempt(results, "cai known frequencies", known, **about)
        attempt(results, "fbgemm", partial(run_fbgemm, batches, sizes, device, ratio), **about)


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    budget = int(float(options.budget[:-2]) * UNITS[options.budget[-2:].upper()])
    rows = TIMES * budget // (4 * options.dim)
    sizes = Sizes(rows, options.dim, options.batch, options.bag, options.steps, options.warmup)
    weight = torch.empty(rows, options.dim).uniform_(-0.01, 0.01)
    print(
        f"table {rows:,} x {options.dim}, {weight.nbytes / 1e9:.3f} GB; budget {budget / 1e9:.3f} GB",
        flush=True,
    )
    results: list[dict] = []
    for alpha in options.alphas:
        measure(results, weight, Ids(sizes, alpha), alpha, options)
    record = {
        "command": " ".join(["python", "benchmarks/cached_embedding.py", *sys.argv[1:]]),
        "machine": machine(device),
        "versions": versions(),
        "budget_bytes": budget,
        "table_bytes": weight.nbytes,
        "rows": rows,
        "settings": {name: getattr(options, name) for name in ("dim", "batch", "bag", "steps", "warmup")},
        "results": results,
    }
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
