"""Masked, sequence-to-sequence, image and speech models of transformers against a plain loop in float64.

python tests/sweep/heads.py [--kinds a,b] [--types a,b] [--columns a,b] [--page]

Each type is built tiny, from one seed, and trained for two steps of SGD, clipped; then it is evaluated. What cai does
to it is what a user does: one call before the loop. Results go to docs/proof/heads.json, the page is docs/heads.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cai_gemini import Tuning, offload
from cai_gemini.planning import Rates
from cai_kernels import swap
from cai_mesh.errors import CaiError
from cai_mesh.gradients import clip_grad_norm_
from cai_mesh.layout import BoxedTensor, canonical_name
from cai_mesh.testing import RankError, run_ranks
from cai_tensor_parallel import parallelize
from cai_zero import full_state_dict, shard_module, shard_optimizer
from sweep.configs import NotBuilt, first_line
from sweep.heads_page import page
from sweep.kinds import KINDS, batch, build, loss_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs" / "proof" / "heads.json", ROOT / "docs" / "heads.md"
STEPS, RATE, CLIP, TIMEOUT = 2, 0.05, 0.5, 90.0
CLOSE = 5e-7
"""Some models compute a part in float32 whatever their dtype, EuroBERT its logits: a bit of a loss is 1.1e-7 of it."""
SLOW_HOST = Rates(to_device=2e6, to_host=1e6, both=2e6, host_step=4e6, device_step=4e12)
Made = tuple[nn.Module, torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def plain(model: nn.Module) -> Made:
    return model, sgd(model)


def with_kernels(model: nn.Module) -> Made:
    swap(model)
    return plain(model)


def offloaded(model: nn.Module) -> Made:
    return offload(model, sgd(model), residency="host", device_memory="1GB", tuning=Tuning(rates=SLOW_HOST))


def _mesh(name: str) -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def zero1(model: nn.Module) -> Made:
    return model, shard_optimizer(sgd(model), _mesh("dp_shard"), model=model, stage=1)


def zero3(model: nn.Module) -> Made:
    shard_module(model, _mesh("dp_shard"))
    return plain(model)


def tp2(model: nn.Module) -> Made:
    return plain(parallelize(model, _mesh("tp")))


def tp2_sequence(model: nn.Module) -> Made:
    return plain(parallelize(model, _mesh("tp"), sequence=True))


COLUMNS: dict[str, tuple[Callable[[nn.Module], Made], int, str]] = {
    "swap": (
        with_kernels,
        1,
        "kernels, which on a CPU run in their plain torch forms, in training and evaluation",
    ),
    "offload": (offloaded, 1, "weights, gradients and state in host memory"),
    "zero1": (zero1, 2, "two ranks, each with half of the optimizer's state, and the same batch"),
    "zero3": (zero3, 2, "two ranks, each with half of every parameter, and the same batch"),
    "tp2": (tp2, 2, "two ranks that share every layer"),
    "tp2 sequence": (tp2_sequence, 2, "the same, and what the layers do not cut is cut along the sequence"),
}


def trained(kind: str, model_type: str, column: str) -> dict[str, Any]:
    """Losses and final weights of a cell, on rank 0; or {"refused": why}, {"crashed": why}, {"not built": why}."""
    try:
        model = build(kind, model_type)
    except NotBuilt as reason:
        return {"not built": str(reason)}
    shapes = {name: param.shape for name, param in model.named_parameters()}
    try:
        model, optimizer = COLUMNS[column][0](model) if column in COLUMNS else plain(model)
        losses = _loop(kind, model, optimizer, column)
        return {"losses": losses, "weights": _weights(model, column, shapes)}
    except (CaiError, NotImplementedError) as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"crashed": first_line(error)}


def _loop(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, column: str) -> list[float]:
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = loss_of(model, batch(kind, model, step))
        loss.backward()
        if column.startswith("tp2"):  # torch's own would count a rank's parts
            clip_grad_norm_(model.parameters(), CLIP, _mesh("tp"))
        else:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return [*losses, loss_of(model, batch(kind, model, STEPS)).item()]


def _weights(model: nn.Module, column: str, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    if column == "zero3":
        return full_state_dict(model, only=lambda name: name in shapes)
    if column.startswith("tp2"):
        boxes = {
            n: BoxedTensor.from_param(p) for n, p in model.named_parameters() if canonical_name(n, p) == n
        }
        return {name: boxed.to_full(dist.group.WORLD).clone() for name, boxed in boxes.items()}
    return {n: p.detach().clone().view(shapes[n]) for n, p in model.named_parameters() if n in shapes}


def cell(kind: str, model_type: str, column: str, wanted: dict[str, Any]) -> dict[str, str]:
    try:
        answers = run_ranks(COLUMNS[column][1], trained, kind, model_type, column, timeout=TIMEOUT)
    except RankError as error:
        return {"outcome": "crashed", "reason": str(error).strip().splitlines()[-1][:200]}
    for answer in answers:
        for outcome in ("refused", "crashed"):
            if outcome in answer:
                return {"outcome": outcome, "reason": answer[outcome]}
    return judged(answers[0], wanted)


def judged(got: dict[str, Any], wanted: dict[str, Any]) -> dict[str, str]:
    for number, (a, b) in enumerate(zip(got["losses"], wanted["losses"], strict=True)):
        if not abs(a - b) <= CLOSE * max(1.0, abs(b)):
            return {"outcome": "wrong", "reason": f"loss {number} is {a:.9f}, not {b:.9f}"}
    for name, value in wanted["weights"].items():
        if name in got["weights"] and not torch.allclose(got["weights"][name], value, rtol=0, atol=CLOSE):
            gap = float((got["weights"][name] - value).abs().max())
            return {"outcome": "wrong", "reason": f"{name} differs by {gap:.1e}"}
    return {"outcome": "right"}


def run_row(kind: str, model_type: str, columns: list[str]) -> dict[str, Any]:
    """The outcomes of some columns of a row, beside what it is; or {"not built": why}."""
    try:
        wanted = run_ranks(1, trained, kind, model_type, "plain", timeout=TIMEOUT)[0]
    except RankError as error:
        wanted = {"crashed": str(error).strip().splitlines()[-1][:200]}
    head = {"head": KINDS[kind].of(model_type)[0]}
    for reason in ("not built", "crashed", "refused"):
        if reason in wanted:
            return head | {"not built": wanted[reason]}
    return head | {column: cell(kind, model_type, column, wanted) for column in columns}


def written(table: dict[str, dict[str, Any]]) -> str:
    return page(table, {name: what for name, (_, _, what) in COLUMNS.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds, by commas; all of them without it")
    parser.add_argument("--types", help="model types, by commas; all of them without it")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="columns, by commas")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    options = parser.parse_args()
    columns = options.columns.split(",")
    table = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for kind in options.kinds.split(","):
        types = KINDS[kind].types
        chosen = options.types.split(",") if options.types else types
        for model_type in [] if options.page else [name for name in chosen if name in types]:
            key, row = f"{kind}:{model_type}", run_row(kind, model_type, columns)
            table[key] = row if "not built" in row else {**table.get(key, {}), **row}
            table[key] = {c: v for c, v in table[key].items() if "not built" in row or c != "not built"}
            told = row.get("not built") or ", ".join(f"{c}: {row[c]['outcome']}" for c in columns)
            print(f"{kind} {model_type:<24} {told}", flush=True)
            RESULTS.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(written(table))


if __name__ == "__main__":
    main()
