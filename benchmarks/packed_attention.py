"""Causal attention of packed sequences, forward and backward: cuDNN by its frontend, torch's flash and FlexAttention.

    python benchmarks/packed_attention.py --out FILE [--tiny]

Rates are floating-point operations over the sequences' triangles a second; what is hidden is not counted, but windows
are. A case's error is that of the largest of four results beside float64, at its first 2,048 tokens. Medians.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cai_kernels import varlen_attention
from cai_kernels.attention import packed_graphs


@dataclass(frozen=True)
class Case:
    """Sequences with heads.

    Args:
        name: what is said of the lengths.
        lengths: tokens of each sequence.
        heads: heads of queries, heads of keys, features.
        window: keys that a query sees; None: all before it.
    """

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int, int] = (32, 8, 128)
    window: int | None = None

    def flops(self) -> float:
        """Operations of forward: two products over what is seen, of two operations an element."""
        pairs = sum(
            length * (length + 1) / 2 - max(length - (self.window or length), 0) ** 2 / 2
            for length in self.lengths
        )
        return 4 * pairs * self.heads[0] * self.heads[2]


def log_uniform(tokens: int, seed: int, least: int = 8, most: int = 4096) -> tuple[int, ...]:
    random = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        exponent = torch.rand(1, generator=random).item()
        lengths.append(min(int(least * (most / least) ** exponent), tokens - sum(lengths)))
    return tuple(lengths)


def cases(tiny: bool) -> Iterator[Case]:
    if tiny:
        yield Case("mixed", (5, 20, 39), (4, 2, 16))
        yield Case("mixed", (5, 20, 39), (4, 2, 16), 8)
        return
    for heads in ((32, 8, 128), (32, 32, 128), (16, 2, 128), (32, 8, 64)):
        for tokens in (8192, 32768):
            for seed in (0, 1):
                yield Case(f"log-uniform {seed}", log_uniform(tokens, seed), heads)
        yield Case("documents of 4,096", (4096,) * 8, heads)
        yield Case("one long among short", (8192,) + (128,) * 192, heads)
    yield Case("one document", (32768,))
    yield Case("two documents", (16384,) * 2)
    yield Case("documents of 512", (512,) * 64)
    for window in (512, 1024, 4096):
        yield Case("log-uniform 0", log_uniform(32768, 0), window=window)
        yield Case("one long among short", (8192,) + (128,) * 192, window=window)


def tensors(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v [T, N, H], the gradient of the result, and where sequences begin."""
    heads, key_heads, width = case.heads
    tokens = sum(case.lengths)
    draw = [
        torch.randn(tokens, n, width, device=device, dtype=dtype)
        for n in (heads, key_heads, key_heads, heads)
    ]
    starts = torch.tensor((0, *accumulate(case.lengths)), dtype=torch.int32, device=device)
    return [t.requires_grad_() for t in draw[:3]], draw[3], starts


def forms(case: Case, starts: Tensor, tokens: int) -> dict[str, Callable[..., Tensor]]:
    device = starts.device
    document = torch.searchsorted(
        starts[1:].contiguous(), torch.arange(tokens, device=device, dtype=torch.int32), right=True
    )

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query - key < case.window) if case.window else query >= key
        return (query >= key) & (document[query] == document[key]) & near

    longest = max(case.lengths)
    mask = create_block_mask(seen, None, None, tokens, tokens, device=str(device))

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FLEX(*(t.transpose(0, 1)[None] for t in (q, k, v)), block_mask=mask, enable_gqa=True)[
            0
        ].transpose(0, 1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, starts, causal=True, window=case.window)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, starts, starts, max_seqlen=longest, causal=True, window=case.window)

    found = {"ours": ours, "flash": flash, "flex": flex}
    return found if device.type == "cuda" else {"ours": ours}


FLEX = torch.compile(flex_attention, dynamic=False)


def timed(run: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of the device: replays of a graph, so that the host's launches do not count."""
    if not torch.cuda.is_available():
        run()
        return math.nan
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def host_microseconds(run: Callable[[], object]) -> float:
    """How long a call keeps the host."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        run()
    return round((time.perf_counter() - began) * 1e5, 1)


def exact(case: Case, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Result and gradients in float64, one sequence after the other."""
    q, k, v = (t.detach().double().requires_grad_() for t in inputs)
    heads, key_heads, width = case.heads
    outs = []
    for a, b in pairwise((0, *accumulate(case.lengths))):
        part = [t[a:b].transpose(0, 1) for t in (q, k, v)]
        wide = [part[0], *(t.repeat_interleave(heads // key_heads, 0) for t in part[1:])]
        at = torch.arange(b - a, device=q.device)
        distance = at[:, None] - at
        hidden = (distance < 0) | (distance >= (case.window or b - a))
        scores = (wide[0] @ wide[1].transpose(1, 2) * width**-0.5).masked_fill(hidden, -math.inf)
        outs.append((scores.softmax(-1) @ wide[2]).transpose(0, 1))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def errors(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The largest relative error of the result and three gradients, at the first tokens of a case."""
    left, short = 2048, []
    for length in case.lengths:
        short.append(min(length, left))
        left -= short[-1]
        if not left:
            break
    case = Case(case.name, tuple(short), case.heads, case.window)
    inputs, dout, starts = tensors(case, device, dtype)
    want = exact(case, inputs, dout)
    found = {}
    for name, run in forms(case, starts, len(dout)).items():
        if name == "flex":
            continue
        out = run(*inputs)
        got = [out, *torch.autograd.grad(out, inputs, dout)]
        found[name] = max(float((g.double() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True))
    return found


def row(case: Case, device: torch.device, dtype: torch.dtype, repeats: int) -> dict:
    inputs, dout, starts = tensors(case, device, dtype)
    result = {
        "case": case.name,
        "tokens": len(dout),
        "sequences": len(case.lengths),
        "longest": max(case.lengths),
        "heads": case.heads,
        "window": case.window,
        "errors": errors(case, device, dtype),
    }
    for name, run in forms(case, starts, len(dout)).items():
        both = timed(lambda run=run: torch.autograd.grad(run(*inputs), inputs, dout), repeats)
        with torch.no_grad():
            forward = timed(lambda run=run: run(*inputs), repeats)
            result[f"{name}_forward_host_us"] = host_microseconds(lambda run=run: run(*inputs))
        result[f"{name}_forward_tflops"] = round(case.flops() / forward / 1e9, 1)
        result[f"{name}_both_tflops"] = round(3.5 * case.flops() / both / 1e9, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any device")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(f"cuDNN's frontend: {packed_graphs.why_not_installed() or 'there'}")
    torch._dynamo.config.recompile_limit = 256  # FlexAttention is compiled for each shape
    rows = []
    for case in cases(options.tiny):
        rows.append(row(case, device, dtype, 9))
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            hardware = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
            record = {
                "torch": torch.__version__,
                "cudnn": torch.backends.cudnn.version(),
                "hardware": hardware,
            }
            options.out.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
