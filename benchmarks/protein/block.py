"""One block of the Evoformer, forward and backward: ours and OpenFold's; one JSON line a form and shape.

    PYTHONPATH=path/to/openfold python benchmarks/protein/block.py --out block.jsonl
    PYTHONPATH=path/to/openfold python benchmarks/protein/block.py --device cpu --dtype fp32 --sequences 4 \
        --residues 12 --repeats 2 --rounds 1

`ours` is a block as `cai train` runs it on a GPU, compiled; `ours-eager` is not compiled. `openfold` is OpenFold's
EvoformerBlock in plain PyTorch, without chunks; `openfold-compiled` is that by torch.compile, which may break it into
several graphs. OpenFold is fetched by the user and put on PYTHONPATH (see peer.py). All have AlphaFold's sizes, the
same random weights in the dtype of computing, a batch of 1, and dropout. With recompute backward runs the forward
again: `full` keeps a block's inputs alone, the other kinds are ours only.

Times are medians over all rounds; every other round takes the forms in reverse. `matmul_floor_ms` is what the products
of forward and backward take at `--tflops`. Errors are relative to what OpenFold computes in fp32 of the same weights
and inputs without dropout, the larger one of alignment and pair.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peer
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from cai_apps.applications.protein.flops import block_flops
from cai_apps.applications.protein.model.evoformer import BlockSizes, EvoformerBlock
from cai_apps.compose.blocks import compile_layers, recompute_layers

FORMS = ("ours", "ours-eager", "openfold", "openfold-compiled")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES = BlockSizes()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument(
        "--recompute", nargs="+", choices=("none", "selective", "most", "full"), default=["none", "full"]
    )
    parser.add_argument(
        "--sequences", nargs="+", type=int, default=[128, 512], help="one for each of --residues"
    )
    parser.add_argument("--residues", nargs="+", type=int, default=[256, 384])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20, help="of a form in a round")
    parser.add_argument("--warmup", type=int, default=5, help="of a form in a round, not timed")
    parser.add_argument("--tflops", type=float, default=673, help="of the GPU's products, for the floor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="file to append to")
    return parser.parse_args()


@dataclass
class Form:
    """One way to run the block.

    Args:
        call: m, z and their masks -> m and z.
        times: milliseconds of forward and backward, of each repeat.
    """

    name: str
    recompute: str
    module: nn.Module
    call: Callable[..., tuple[Tensor, Tensor]]
    row: dict[str, Any] = field(default_factory=dict)
    times: list[tuple[float, float]] = field(default_factory=list)
    peak: float = 0.0


def form_of(name: str, recompute: str, ours: nn.Module, theirs: nn.Module | None) -> Form:
    """A form with weights of its own."""
    module = copy.deepcopy(ours if theirs is None else theirs)
    if name.startswith("ours"):
        compiled = name == "ours"
        if recompute != "none":
            recompute_layers([module], form=recompute, compiled=compiled)
        if compiled:
            compile_layers([module])
        return Form(name, recompute, module, module)
    call: Callable[..., Any] = module
    if recompute == "full":
        call = functools.partial(checkpoint, module, use_reentrant=False)
    if name == "openfold-compiled":
        call = torch.compile(call)
    return Form(name, recompute, module, call)


def inputs(sequences: int, residues: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """m, z and their masks; nothing is masked."""
    draws = torch.Generator(device).manual_seed(0)
    shapes = (1, sequences, residues, SIZES.c_m), (1, residues, residues, SIZES.pair.c_z)
    m, z = (torch.randn(shape, generator=draws, device=device).to(dtype) for shape in shapes)
    return [m, z, torch.ones_like(m[..., 0]), torch.ones_like(z[..., 0])]


def values(call: Callable[..., Any], given: Sequence[Tensor]) -> list[Tensor]:
    """m and z, and the gradients of what went in, on the CPU."""
    m, z = (x.detach().clone().requires_grad_() for x in given[:2])
    out = call(m, z, *given[2:])
    draws = torch.Generator(m.device).manual_seed(1)
    weights = [torch.randn(x.shape, generator=draws, device=x.device).to(x.dtype) for x in out]
    grads = torch.autograd.grad(out, (m, z), weights)
    return [x.detach().float().cpu() for x in (*out, *grads)]


def errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    each = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    return {"error": float(f"{max(each[:2]):.3g}"), "gradient_error": float(f"{max(each[2:]):.3g}")}


def repeat(form: Form, given: Sequence[Tensor], device: torch.device, *, warmup: int, count: int) -> None:
    """Time forward and backward, and see how much memory they take."""
    on_gpu = device.type == "cuda"
    m, z = (x.detach().clone().requires_grad_() for x in given[:2])
    grads = [torch.randn_like(m), torch.randn_like(z)]
    marks = []
    if on_gpu:
        torch.cuda.empty_cache()
    for number in range(warmup + count):
        if number == warmup and on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        m.grad = z.grad = None
        form.module.zero_grad(set_to_none=True)
        start = _now(on_gpu)
        out = form.call(m, z, *given[2:])
        between = _now(on_gpu)
        torch.autograd.backward(out, grads)
        del out
        marks.append((start, between, _now(on_gpu)))
    if on_gpu:
        torch.cuda.synchronize()
        form.peak = max(form.peak, torch.cuda.max_memory_allocated() / 2**30)
    form.times += [(_ms(a, b), _ms(b, c)) for a, b, c in marks[warmup:]]
    form.module.zero_grad(set_to_none=True)


def _now(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def _ms(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def forms_at(options: argparse.Namespace, given: Sequence[Tensor], device: torch.device) -> list[Form]:
    """All forms, compiled and compared with OpenFold in fp32."""
    ours = EvoformerBlock(SIZES)
    peer.randomize(ours, 0)
    dtype = DTYPES[options.dtype]
    ours.to(dtype)
    theirs = peer.block(SIZES, ours)  # in fp32, of weights rounded alike
    wide = [x.float() for x in given]
    expected = values(theirs.to(device).eval(), wide)
    theirs.to("cpu", dtype)
    found = []
    for name in options.forms:
        for recompute in options.recompute:
            if name.startswith("openfold") and recompute not in ("none", "full"):
                continue
            form = form_of(name, recompute, ours, theirs if name.startswith("openfold") else None)
            counters.clear()
            form.module.to(device).eval()
            form.row = errors(values(form.call, given), expected)
            form.module.train()
            began = time.perf_counter()
            repeat(form, given, device, warmup=0, count=1)
            form.row["first_seconds"] = round(time.perf_counter() - began, 1)
            form.row["graph_breaks"] = sum(counters["graph_break"].values())
            form.times.clear()
            found.append(form)
    return found


def shape(options: argparse.Namespace, sequences: int, residues: int) -> None:
    device = torch.device(options.device)
    torch._dynamo.reset()  # else a second shape would be compiled for all shapes
    given = inputs(sequences, residues, DTYPES[options.dtype], device)
    forms = forms_at(options, given, device)
    for number in range(options.rounds):
        for form in forms if number % 2 == 0 else reversed(forms):
            repeat(form, given, device, warmup=options.warmup, count=options.repeats)
    flops = 3 * block_flops(SIZES, residues, sequences)
    for form in forms:
        forward, backward, both = (
            [*column] for column in (*zip(*form.times, strict=True), map(sum, form.times))
        )
        row = {
            "form": form.name, "recompute": form.recompute, "sequences": sequences, "residues": residues,
            "dtype": options.dtype, "forward_ms": round(statistics.median(forward), 3),
            "backward_ms": round(statistics.median(backward), 3), "ms": round(statistics.median(both), 3),
            "spread": [round(pick(both), 3) for pick in (min, max)],
            "matmul_floor_ms": round(flops / options.tflops / 1e9, 3),
            "peak_gib": round(form.peak, 3) if device.type == "cuda" else None, **form.row,
            "repeats": len(form.times), "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    options = arguments()
    torch._dynamo.config.recompile_limit = 64  # every form in training and evaluation
    for sequences, residues in zip(options.sequences, options.residues, strict=True):
        shape(options, sequences, residues)


if __name__ == "__main__":
    main()
