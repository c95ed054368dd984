"""Numbers that a tensor-parallel rank receives and keeps for one layer, on simulated ranks and by closed form.

    python benchmarks/volume.py --ranks 4,8,16,64 [--hidden 1024 --sequence 512 --batch 32] [--out FILE]

One process stands for the first rank of each mesh (torch's fake process group): every collective is seen by what torch
dispatches, with the size of its tensor and its group. `--plot FILE` draws the closed forms.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cai_mesh.comm import ParallelMesh
from cai_mesh.errors import PlanError
from cai_tensor_parallel import parallelize, sub_axes
from cai_tensor_parallel.volume import Layer, kept, received

FORMS = [
    ("1d", 1, False),
    ("1d", 1, True),
    ("2d", 1, False),
    ("2.5d", 2, False),
    ("2.5d", 4, False),
    ("3d", 1, False),
]
"""(mode, depth, sequence)."""


class Counter(TorchDispatchMode):
    """Adds up what a rank receives, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1].strip("_")
            numbers = self._received(name, args)
            if numbers:
                self.seen[name] = self.seen.get(name, 0.0) + numbers
        return func(*args, **(kwargs or {}))

    def _received(self, name: str, args: Any) -> float:
        group = next((_group(arg) for arg in args if _group(arg) is not None), None)
        if group is None:  # waits, and what only wraps a result
            return 0.0
        p, tensors = group.size(), [t for arg in args for t in _tensors(arg)]
        if name.startswith(("allreduce", "all_reduce")):
            return 2 * (p - 1) / p * tensors[0].numel()
        if name == "reduce":
            return (p - 1) / p * tensors[0].numel()
        if name == "broadcast":
            return tensors[0].numel() * (p - 1) / p  # on all ranks but the sender, who changes
        if "reduce_scatter" in name:
            return (p - 1) / p * max(t.numel() for t in tensors)
        if "gather" in name:
            return (p - 1) * min(t.numel() for t in tensors)
        raise RuntimeError(f"an operator that is not counted: {name}")


def _group(arg: Any) -> dist.ProcessGroup | None:
    if isinstance(arg, str) and arg not in ("sum", "max", "avg"):
        return dist.distributed_c10d._resolve_process_group(arg)
    if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
        return dist.ProcessGroup.unbox(arg)
    return None


def _tensors(arg: Any) -> list[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        return [arg]
    return [t for each in arg for t in _tensors(each)] if isinstance(arg, list | tuple) else []


KEPT = "kept"


class Keeper:
    """Adds up what is kept for backward, each memory once, parameters and what is no larger than a vector left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.total = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if tensor.dim() > 1 and memory.data_ptr() not in self.seen:
            self.seen.add(memory.data_ptr())
            self.total += memory.nbytes() // tensor.itemsize
        return tensor


def counted(form: tuple[str, int, bool], options: argparse.Namespace, ranks: int) -> dict[str, float]:
    """What the first of `ranks` receives and keeps in one layer: a model of two layers, less one of one layer."""
    both = [_model(form, options, ranks, layers) for layers in (1, 2)]
    return {name: both[1][name] - both[0].get(name, 0.0) for name in both[1]}


def _model(
    form: tuple[str, int, bool], options: argparse.Namespace, ranks: int, layers: int
) -> dict[str, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    mode, depth, sequence = form
    axes = sub_axes(mode, ranks, depth)
    mesh = dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    heads = options.heads
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // options.groups,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    parallelize(model, ParallelMesh.of(mesh), mode=mode, sequence=sequence)
    ids = torch.zeros(options.batch, options.sequence, dtype=torch.int64)
    keeper = Keeper(model)
    with Counter() as counter, torch.autograd.graph.saved_tensors_hooks(keeper.pack, lambda kept: kept):
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.seen | {KEPT: float(keeper.total)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="4,8,16,64")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--groups", type=int, default=1, help="query heads that share a key/value head")
    parser.add_argument("--formula", action="store_true", help="closed forms alone")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = []
    layer = Layer(
        options.batch * options.sequence, options.hidden, 4 * options.hidden, options.hidden // options.groups
    )
    for ranks in map(int, options.ranks.split(",")):
        if not options.formula:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        for form in FORMS:
            rows += _row(form, layer, options, ranks)
        if not options.formula:
            dist.destroy_process_group()
    if options.out:
        options.out.write_text(json.dumps({"layer": vars(layer), "rows": rows}, indent=1) + "\n")
    if options.plot:
        plot(layer, options.plot)


def _row(
    form: tuple[str, int, bool], layer: Layer, options: argparse.Namespace, ranks: int
) -> list[dict[str, Any]]:
    mode, depth, sequence = form
    try:
        sub_axes(mode, ranks, depth)
    except PlanError:
        return []
    row: dict[str, Any] = {"mode": mode, "depth": depth, "sequence": sequence, "ranks": ranks}
    row["formula"] = received(mode, layer, ranks, depth=depth, sequence=sequence)
    if not options.formula:
        found = counted(form, options, ranks)
        row["kept"], row["kept, formula"] = found.pop(KEPT), kept(mode, layer, ranks, sequence=sequence)
        row["by operator"], row["counted"] = found, sum(found.values())
    print(json.dumps(row), flush=True)
    return [row]


def plot(layer: Layer, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for mode, depth, sequence in FORMS:
        points = []
        for ranks in range(2, 513):
            try:
                sub_axes(mode, ranks, depth)
            except PlanError:
                continue
            if mode == "1d" and ranks & (ranks - 1):
                continue
            if mode == "2.5d" and ranks == depth:
                continue
            points.append((ranks, received(mode, layer, ranks, depth=depth, sequence=sequence) / 1e6))
        label = mode + (f", depth {depth}" if mode == "2.5d" else "") + (", sequence cut" if sequence else "")
        axis.plot(*zip(*points, strict=True), marker="o", label=label)
    axis.set(
        xscale="log", yscale="log", xlabel="ranks", ylabel="millions of numbers a rank receives for a layer"
    )
    axis.set_title(f"{layer.tokens:,} tokens, {layer.hidden} features")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
