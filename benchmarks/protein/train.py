"""Training steps of AlphaFold: ours and OpenFold's; one JSON line a form.

    python benchmarks/protein/train.py --form ours --out steps.jsonl
    PYTHONPATH=path/to/openfold python benchmarks/protein/train.py --form openfold --rounds 4 --out steps.jsonl
    PYTHONPATH=path/to/openfold python benchmarks/protein/train.py --form check --device cpu --dtype fp32 --blocks 1 \
        --residues 12 --sequences 4 --extra 6

`ours` is the session that `cai train` builds of the recipe's config (`cai_apps.compose.apply`); `--set` changes it.
`openfold` is OpenFold's AlphaFold and its loss in its config of the first training: a checkpoint at each block, fp32
weights, bf16 autocast, torch's Adam, its moving average, gradients clipped to 0.1. `openfold-nockpt` has no
checkpoints, `openfold-compiled` is `openfold` with its blocks by torch.compile. OpenFold is fetched by the user and put
on PYTHONPATH (see peer.py). `check` steps nothing: it compares the losses of both, of the same random weights without
dropout.

The model is AlphaFold's of 93M parameters without templates; `--blocks` makes it shorter. A sample is a made-up chain
of as many residues as the crop, with 1,200 sequences, so that nothing is padding; both read the same ones. A step has
`--rounds` rounds, of which the last one learns. Its seconds are from the end of one step to the end of the next on the
device; ours reads loss and norm of each step, as `cai train` does, OpenFold's loss reads each of its parts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peer
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.fx_passes import fuse_attention

from cai_apps import recipes
from cai_apps.applications.protein import design
from cai_apps.applications.protein.chemistry import GAP, LETTERS, tables
from cai_apps.applications.protein.data.batch import packed
from cai_apps.applications.protein.data.examples import each_tensor, example
from cai_apps.applications.protein.data.sequences import Alignment
from cai_apps.applications.protein.data.structures import Chain
from cai_apps.applications.protein.flops import piece_flops
from cai_apps.applications.protein.loss.whole import Truth, losses, total
from cai_apps.applications.protein.model.alphafold import AlphaFold, Features, Sizes
from cai_apps.applications.protein.model.atoms import atoms_of, groups_of
from cai_apps.applications.protein.model.frames import from_points
from cai_apps.applications.protein.task import PROTEIN
from cai_apps.applications.protein.workload import piece_of, workload
from cai_apps.compose.apply import apply
from cai_apps.run.loop.training_loop import reading
from cai_apps.run.train import settle

FORMS = ("ours", "openfold", "openfold-nockpt", "openfold-compiled", "check")
Sample = tuple[list[Features], Truth]
Step = Callable[[dict[str, Tensor]], Tensor]
ALIGNED, CLIP, DECAY, LR = 1200, 0.1, 0.999, 1e-4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="values of the recipe, ours alone"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--residues", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--extra", type=int, default=1024)
    parser.add_argument("--blocks", type=int, help="of each stack at most, for a trial")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4, help="steps that are not timed, 1 or more")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--profile", type=Path, help="table of the kernels of two steps")
    parser.add_argument("--out", type=Path, help="file to append to")
    return parser.parse_args()


def value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def config_of(options: argparse.Namespace) -> Any:
    """Of AlphaFold's first training on one GPU."""
    if options.blocks:
        sizes = Sizes(blocks=options.blocks, extra_blocks=options.blocks)
        design.PRESETS["alphafold"] = lambda: sizes
    changes = {
        "model.name": "alphafold", "data.residues": options.residues, "data.sequences": options.sequences,
        "data.extra": options.extra, "data.templates": 0, "objective.rounds": options.rounds,
        "parallel.shard": 1, "parallel.zero": 1, "train.global_batch": 1, "train.microbatch_size": 1,
        "train.device": options.device, "precision.compute": options.dtype, "memory.recompute": "auto",
        "optimizer.clip_samples": CLIP, "optimizer.ema_decay": DECAY,
    }  # fmt: skip
    own = {k: value(v) for k, _, v in (s.partition("=") for s in options.set)}
    config = PROTEIN.resolve(recipes.load("alphafold-tiny", changes | own), 1)
    return settle(PROTEIN, config, 1, options.device) if options.form == "ours" else config


def chain(length: int, draws: torch.Generator) -> Chain:
    """Residues in a row at random, each of its proper form, none of its atoms unknown."""
    residue = torch.randint(len(LETTERS), (1, length), generator=draws)
    real: dict[str, Any] = {"generator": draws, "dtype": torch.float64}
    origin = 2.2 * torch.randn(1, length, 3, **real).cumsum(1)  # nearly 3.8 angstroms from one to the next
    beside = (origin + torch.randn(1, length, 3, **real) for _ in range(2))
    frames = from_points(next(beside), origin, next(beside))
    angles = torch.nn.functional.normalize(torch.randn(1, length, 7, 2, **real), dim=-1)
    atoms = atoms_of(groups_of(frames, angles, residue), residue)[0]
    return Chain("made up", residue[0].numpy(), atoms.numpy(), tables().there[residue[0]].numpy(), 2.0)


def sample(config: Any, number: int) -> Sample:
    """A chain as long as the crop, with sequences that differ from it here and there."""
    draws = torch.Generator().manual_seed(number)
    made = chain(config.data.residues, draws)
    shape = (ALIGNED, config.data.residues)
    residues = torch.randint(GAP + 1, shape, generator=draws)
    kept = torch.rand(shape, generator=draws) < 0.6
    residues = torch.where(kept, torch.from_numpy(made.residue), residues)
    residues[0] = torch.from_numpy(made.residue)
    deletions = np.zeros(shape, np.uint16)
    alignment = Alignment(tuple(map(str, range(ALIGNED))), residues.numpy().astype(np.uint8), deletions)
    return example(alignment, made, piece_of(config), config.objective.rounds, draws)


def ours(config: Any, device: torch.device) -> Step:
    session = apply(config, workload(config), device=device)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss, norm = session.step([batch], total=1), session.norm()
        read = reading([loss, norm], device)
        session.update(LR, norm)
        read()
        return loss

    return step


def theirs(config: Any, form: str, device: torch.device) -> Step:
    """A step as OpenFold's training script takes it with bf16 autocast."""
    sizes = design.sizes_for(config)
    found = peer.config_of(sizes, checkpoints=form != "openfold-nockpt")
    model = peer.model(found, None, sizes).to(device).train()
    if form == "openfold-compiled":
        fuse_attention._sfdp_init = lambda *_: (
            None
        )  # Inductor would put SDPA of four dims for attention of five
        for block in (*model.extra_msa_stack.blocks, *model.evoformer.blocks):
            block.compile()
    loss_of = peer.openfold("utils.loss").AlphaFoldLoss(found.loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, eps=1e-5)
    average = peer.openfold("utils.exponential_moving_average").ExponentialMovingAverage(model, DECAY)
    mixed = config.precision.compute == "bf16"

    def step(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if mixed else contextlib.nullcontext():
            out = model(batch)
            loss = loss_of(out, {name: tensor[..., -1] for name, tensor in batch.items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update(model)
        return loss.detach()

    return step


def check(config: Any, device: torch.device) -> dict[str, Any]:
    """The losses of both, of the same weights without dropout."""
    sizes = design.sizes_for(config)
    model = AlphaFold(sizes)
    peer.randomize(model, 0)
    rounds, truth = sample(config, 0)
    found = peer.config_of(sizes, checkpoints=False)
    other = peer.model(found, model, sizes).to(device).eval()
    model.to(device).eval()
    batch = {name: tensor.to(device) for name, tensor in peer.batch_of(rounds, truth).items()}
    move = _moved(device)
    with torch.no_grad():
        each = losses(model([move(r) for r in rounds]), move(truth))
        own = float(total(each) * config.data.residues**0.5)
        last = {name: tensor[..., -1] for name, tensor in batch.items()}
        loss, parts = peer.openfold("utils.loss").AlphaFoldLoss(found.loss)(other(batch), last, True)
    return {
        "loss": own, "openfold_loss": float(loss), "relative": abs(own - float(loss)) / abs(float(loss)),
        "parts": {name: float(tensor) for name, tensor in each.items()},
        "openfold_parts": {name: float(tensor) for name, tensor in parts.items()},
    }  # fmt: skip


def _moved(device: torch.device) -> Callable[[Any], Any]:
    return lambda x: each_tensor(x, lambda tensor: tensor.to(device))


def batches(config: Any, form: str, device: torch.device, count: int = 4) -> list[dict[str, Tensor]]:
    """What a form reads, on the device; steps take them in turn."""
    make = packed if form == "ours" else peer.batch_of
    held = (make(*sample(config, number)) for number in range(count))
    return [{name: tensor.to(device) for name, tensor in each.items()} for each in held]


def main() -> None:
    options = arguments()
    device, on_gpu = torch.device(options.device), options.device == "cuda"
    config = config_of(options)
    torch.manual_seed(0)
    if options.form == "check":
        print(json.dumps(check(config, device)), flush=True)
        return
    store: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", **store)
    data = batches(config, options.form, device)
    built = time.perf_counter()
    step = ours(config, device) if options.form == "ours" else theirs(config, options.form, device)
    found, ends, first = [], [], 0.0
    for number in range(options.warmup + options.steps):
        found.append(step(data[number % len(data)]))
        ends.append(_now(on_gpu))
        if number == 0:
            float(found[0])
            first = time.perf_counter() - built
    seconds = _between(ends[options.warmup - 1 :])
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    if options.profile:
        _profile(step, data[0], options.profile)
    row = _row(options, config, seconds, peak, first)
    row["losses"] = [round(float(loss), 5) for loss in found[:6]]
    print(json.dumps(row), flush=True)
    if options.out:
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def _row(
    options: argparse.Namespace, config: Any, seconds: list[float], peak: float | None, first: float
) -> dict[str, Any]:
    middle, rounds = statistics.median(seconds), options.rounds
    # piece_flops takes the mean of 1 to the most rounds; here all of them are run
    drawn = replace(config, objective=replace(config.objective, rounds=2 * rounds - 1))
    return {
        "form": options.form, "set": options.set, "rounds": rounds, "residues": options.residues,
        "sequences": options.sequences, "extra": options.extra, "blocks": options.blocks,
        "dtype": options.dtype, "recompute": config.memory.recompute if options.form == "ours" else None,
        "step_seconds": round(middle, 5), "spread": [round(pick(seconds), 5) for pick in (min, max)],
        "steps": len(seconds), "first_step_seconds": round(first, 1),
        "tflops": round(piece_flops(drawn) / middle / 1e12, 1),
        "peak_gib": None if peak is None else round(peak, 2), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
    }  # fmt: skip


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


def _profile(step: Step, batch: dict[str, Tensor], file: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            step(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    averages = found.key_averages()
    wide: dict[str, Any] = {"row_limit": 60, "max_name_column_width": 90}
    host = averages.table(sort_by="self_cpu_time_total", **wide)
    file.write_text(averages.table(sort_by=by, **wide) + "\n\n" + host)


if __name__ == "__main__":
    main()
