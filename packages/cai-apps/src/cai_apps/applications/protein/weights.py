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
from cai_apps.config.places import check_regular
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
    check_regular(path)
    tensors = _arrays(path) if path.suffix == ".npz" else _load(path)
    errors = ("predicted_aligned_error_head", "aux_heads.tm.")
    return Parts(
        templates=any("template" in name for name in tensors),
        errors=any(part in name for name in tensors for part in errors),
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
    tensors = _load(path)
    keys = openfold_names(model)
    _check_names(path, set(keys.values()), set(tensors))
    _fill(model, path, {name: tensors[key] for name, key in keys.items()}, keys)


def read_alphafold(model: AlphaFold, path: Path) -> None:
    """Fill a model from AlphaFold's `params_model_*.npz`; nothing is unpickled.

    Raises `DataError` as `read_openfold`, and where a stack has another number of blocks.
    """
    arrays = _arrays(path)
    place_by_name = places([name for name, _ in model.named_parameters()])
    _check_names(path, {place.key for place in place_by_name.values()}, set(arrays))
    blocks: dict[str, int] = {}
    for place in place_by_name.values():
        if place.at is not None:
            blocks[place.key] = max(blocks.get(place.key, 0), place.at + 1)
    for key, count in blocks.items():
        if len(arrays[key]) != count:
            raise DataError(
                f"{path} has another number of blocks than the model",
                got=f"{key}: {len(arrays[key])}",
                expected=count,
            )
    tensors = {name: read(arrays, place) for name, place in place_by_name.items()}
    _fill(model, path, tensors, {name: place.key for name, place in place_by_name.items()})


def _check_names(path: Path, expected_names: set[str], file_names: set[str]) -> None:
    missing, extra = sorted(expected_names - file_names), sorted(file_names - expected_names)
    if missing or extra:
        raise DataError(
            f"{path} has other parameters than the model",
            got=f"missing: {_few(missing)}; not known: {_few(extra)}",
            fix="a model with the same parts: templates, aligned errors (ptm), as many blocks",
        )


def _fill(model: AlphaFold, path: Path, tensors: dict[str, Tensor], keys: dict[str, str]) -> None:
    """Copy tensors by our names, once all fit; `keys`: what the file calls them."""
    params = dict(model.named_parameters())
    misshapen = [name for name, value in tensors.items() if value.shape != params[name].shape]
    if misshapen:
        got, expected = (tuple(of[misshapen[0]].shape) for of in (tensors, params))
        raise DataError(
            f"{len(misshapen)} parameters of {path} have another shape",
            got=f"{keys[misshapen[0]]}: {got}",
            expected=expected,
        )
    with torch.no_grad():
        for name, value in tensors.items():
            params[name].copy_(value)


def write_openfold(model: AlphaFold, path: Path) -> None:
    """A file that OpenFold reads."""
    keys = openfold_names(model)
    torch.save({keys[name]: param.detach().cpu() for name, param in model.named_parameters()}, path)


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
            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
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
    if isinstance(state, dict) and isinstance(state.get("ema"), dict):
        state = state["ema"]["params"]
    elif isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if (
        not isinstance(state, dict)
        or not state
        or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items())
    ):
        raise DataError(f"{path} is no state dict", got=type(state).__name__, expected="tensors by name")
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in state)), None):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _few(keys: list[str]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return (", ".join(keys[:SHOWN]) or "none") + more
