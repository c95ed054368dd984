"""Weights from OpenFold's files, and to them; weights from AlphaFold's."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from cai_apps.applications.protein import names
from cai_apps.applications.protein.arrays import places, read
from cai_apps.applications.protein.model.alphafold import AlphaFold
from cai_mesh.errors import DataError
from cai_mesh.files import check_header

PREFIXES = ("module.", "model.")
"""What names begin with in files of training runs."""
SHOWN = 5


def openfold_names(model: AlphaFold) -> dict[str, str]:
    """Return OpenFold's name of each parameter, by ours."""
    templates = 0 if model.template is None else len(model.template.blocks)
    table = names.alphafold(len(model.evoformer.blocks), len(model.extra_stack.blocks), templates)
    return {name: names.parameter(name, table) for name, _ in model.named_parameters()}


def openfold_name(model: AlphaFold) -> Callable[[str], str]:
    """What files of weights call a parameter of this model, for `cai_mesh.checkpoint.save_hf` and `load_hf`."""
    return openfold_names(model).__getitem__


@dataclass(frozen=True)
class Parts:
    """Which parts that a model may lack a file of weights has: what reads templates, what predicts aligned errors."""

    templates: bool
    errors: bool


def parts_of(path: Path) -> Parts:
    """Raises `DataError` for a file that cannot be read."""
    held = _arrays(path) if path.suffix == ".npz" else _load(path)
    errors = ("predicted_aligned_error_head", "aux_heads.tm.")
    return Parts(
        templates=any("template" in name for name in held),
        errors=any(part in name for name in held for part in errors),
    )


def read_weights(model: AlphaFold, path: Path) -> None:
    """Fill a model from a file: OpenFold's (.pt, .safetensors of its names), or AlphaFold's (.npz).

    Raises `DataError` as those do, and where there is no such file.
    """
    if not path.is_file():
        raise DataError(f"no weights at {path}", expected="a file of .pt, .safetensors or .npz")
    (read_alphafold if path.suffix == ".npz" else read_openfold)(model, path)


def read_openfold(model: AlphaFold, path: Path) -> None:
    """Fill a model from a file that `torch.save` wrote of OpenFold's state dict, a run's or its average.

    Only tensors are unpickled.

    Raises:
        DataError: the file is none, or has other parameters or shapes than the model, by name; nothing is written.
    """
    held = _load(path)
    wanted = openfold_names(model)
    _check_names(path, set(wanted.values()), set(held))
    _fill(model, path, {name: held[theirs] for name, theirs in wanted.items()}, wanted)


def read_alphafold(model: AlphaFold, path: Path) -> None:
    """Fill a model from AlphaFold's `params_model_*.npz`; nothing is unpickled.

    Raises `DataError` as `read_openfold`, and where a stack has another number of blocks.
    """
    held = _arrays(path)
    wanted = places([name for name, _ in model.named_parameters()])
    _check_names(path, {place.key for place in wanted.values()}, set(held))
    blocks: dict[str, int] = {}
    for place in wanted.values():
        if place.at is not None:
            blocks[place.key] = max(blocks.get(place.key, 0), place.at + 1)
    for key, count in blocks.items():
        if len(held[key]) != count:
            raise DataError(
                f"{path} has another number of blocks than the model",
                got=f"{key}: {len(held[key])}",
                expected=count,
            )
    found = {name: read(held, place) for name, place in wanted.items()}
    _fill(model, path, found, {name: place.key for name, place in wanted.items()})


def _check_names(path: Path, wanted: set[str], held: set[str]) -> None:
    missing, extra = sorted(wanted - held), sorted(held - wanted)
    if missing or extra:
        raise DataError(
            f"{path} has other parameters than the model",
            got=f"missing: {_few(missing)}; not known: {_few(extra)}",
            fix="a model with the same parts: templates, aligned errors (ptm), as many blocks",
        )


def _fill(model: AlphaFold, path: Path, held: dict[str, Tensor], theirs: dict[str, str]) -> None:
    """Copy tensors by our names, once all fit; `theirs`: what the file calls them."""
    params = dict(model.named_parameters())
    other = [name for name, value in held.items() if value.shape != params[name].shape]
    if other:
        got, expected = (tuple(of[other[0]].shape) for of in (held, params))
        raise DataError(
            f"{len(other)} parameters of {path} have another shape",
            got=f"{theirs[other[0]]}: {got}",
            expected=expected,
        )
    with torch.no_grad():
        for name, value in held.items():
            params[name].copy_(value)


def write_openfold(model: AlphaFold, path: Path) -> None:
    """A file that OpenFold reads."""
    wanted = openfold_names(model)
    torch.save({wanted[name]: param.detach().cpu() for name, param in model.named_parameters()}, path)


def _arrays(path: Path) -> dict[str, Tensor]:
    """Tensors by AlphaFold's names."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as arrays", got=str(error).splitlines()[0]) from None


def _load(path: Path) -> dict[str, Tensor]:
    """Tensors by OpenFold's names, whatever wraps them."""
    try:
        if path.suffix == ".safetensors":
            check_header(path, error=DataError)
            held: Any = load_file(path)
        else:
            held = torch.load(path, map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # of torch's unpickler, too, which fails in many ways over bytes that are no pickle
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{path} cannot be read as weights",
            cause=cause,
            expected="a file of OpenFold's (.pt, .safetensors) or AlphaFold's (.npz) weights",
            fix="copy or download it again",
        ) from None
    if isinstance(held, dict) and isinstance(held.get("ema"), dict):
        held = held["ema"]["params"]
    elif isinstance(held, dict) and isinstance(held.get("state_dict"), dict):
        held = held["state_dict"]
    if (
        not isinstance(held, dict)
        or not held
        or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in held.items())
    ):
        raise DataError(f"{path} is no state dict", got=type(held).__name__, expected="tensors by name")
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in held)), None):
        held = {name.removeprefix(prefix): value for name, value in held.items()}
    return held


def _few(found: list[str]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return (", ".join(found[:SHOWN]) or "none") + more
