"""Weights from OpenFold's files, and to them."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from cai_apps.applications.protein import names
from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_mesh.errors import DataError

PREFIXES = ("module.", "model.")
"""What names begin with in files of training runs."""
SHOWN = 5


def openfold_names(model: AlphaFold) -> dict[str, str]:
    """By our name of each parameter OpenFold's."""
    templates = 0 if model.template is None else len(model.template.blocks)
    table = names.alphafold(len(model.evoformer.blocks), len(model.extra_stack.blocks), templates)
    return {name: names.parameter(name, table) for name, _ in model.named_parameters()}


def read_openfold(model: AlphaFold, path: Path) -> None:
    """Fill a model from a file that `torch.save` wrote of OpenFold's state dict, a run's or its average.

    Only tensors are unpickled.

    Raises:
        DataError: the file is none, or has other parameters or shapes than the model, by name; nothing is written.
    """
    held = _load(path)
    wanted = openfold_names(model)
    missing = sorted(set(wanted.values()) - set(held))
    extra = sorted(set(held) - set(wanted.values()))
    if missing or extra:
        raise DataError(
            f"{path} has other parameters than the model",
            got=f"missing: {_few(missing)}; not known: {_few(extra)}",
            fix="a model with the same parts: templates, aligned errors (ptm), as many blocks",
        )
    params = dict(model.named_parameters())
    other = {
        n: (tuple(held[t].shape), tuple(params[n].shape))
        for n, t in wanted.items()
        if held[t].shape != params[n].shape
    }
    if other:
        name, (got, expected) = next(iter(other.items()))
        raise DataError(
            f"{len(other)} parameters of {path} have another shape",
            got=f"{wanted[name]}: {got}",
            expected=expected,
        )
    with torch.no_grad():
        for name, theirs in wanted.items():
            params[name].copy_(held[theirs])


def write_openfold(model: AlphaFold, path: Path) -> None:
    """A file that OpenFold reads."""
    wanted = openfold_names(model)
    torch.save({wanted[name]: param.detach().cpu() for name, param in model.named_parameters()}, path)


def _load(path: Path) -> dict[str, Tensor]:
    """Tensors by OpenFold's names, whatever wraps them."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(f"{path} cannot be read as weights", got=str(error).splitlines()[0]) from None
    if isinstance(held, dict) and isinstance(held.get("ema"), dict):
        held = held["ema"]["params"]
    elif isinstance(held, dict) and isinstance(held.get("state_dict"), dict):
        held = held["state_dict"]
    if not isinstance(held, dict) or not held or not all(isinstance(v, Tensor) for v in held.values()):
        raise DataError(f"{path} is no state dict", got=type(held).__name__, expected="tensors by name")
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in held)), None):
        held = {name.removeprefix(prefix): value for name, value in held.items()}
    return held


def _few(found: list[str]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return (", ".join(found[:SHOWN]) or "none") + more
