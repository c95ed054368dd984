"""Hugging Face directories in and out: sharded safetensors, box by box.

Loading reads only the rows and columns a rank holds. Saving lays out the files first; every rank then writes its
boxes into them at their place, so no tensor is gathered anywhere.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.checkpoint.agree import control_group
from cai_mesh.checkpoint.assembly import Assembly, Part, reversed_parts
from cai_mesh.checkpoint.loading import SHOWN
from cai_mesh.checkpoint.new_directory import new_directory
from cai_mesh.checkpoint.stored import StoredTensors
from cai_mesh.comm.collectives import all_gather_object
from cai_mesh.errors import CheckpointError
from cai_mesh.files.published import DIFFUSERS, TRANSFORMERS, index_name
from cai_mesh.layout.boxed import BoxedTensor
from cai_mesh.layout.boxes import Box
from cai_mesh.layout.record import canonical_name
from cai_mesh.layout.writes import note_writes

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that need no scale beside them, as safetensors names them."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def _same(name: str) -> str | None:
    return name


def unchanged(shapes: Mapping[str, Sequence[int]]) -> dict[str, Assembly]:
    """Return every tensor of these shapes by its own name, made of itself."""
    return {name: Assembly.of(name, shape) for name, shape in shapes.items()}


def load_hf(
    model: nn.Module,
    directory: str | os.PathLike,
    *,
    file: str | None = None,
    within: str = "",
    names: Callable[[str], str | None] = _same,
    tensors: Callable[[Mapping[str, Sequence[int]]], Mapping[str, Assembly]] = unchanged,
    strict: bool = True,
) -> list[str]:
    """Fill a model's parameters, on any layout, from a directory of safetensors (one file, or several and an index).

    The files are those that `from_pretrained` would read: of one variant, such as fp16, where there are no others.
    Buffers of its state dict are filled too where the files hold them.

    Args:
        file: the one file there that is read, whatever it is called; None: the files of a model.
        within: load only parameters whose names begin so; the files have them without it.
        names: the files' name of a parameter of that name; None: they do not have it, and it stays as it is.
        tensors: a function of the shapes of the files' tensors that returns what the model's are made of, by present
            name: a library may have renamed parts since the files were written, or have made one tensor of several.
        strict: whether the files must have every parameter; False: those that they lack stay as they are.

    A name is looked up as it is, then with and without the model's `base_model_prefix`, and a tied parameter's under
    each of its names. Returns the names of the parameters that stay as they are because the files lack them. Raises
    `CheckpointError` with a table of the parameters that are missing or of another shape, before anything is written.
    """
    directory = Path(directory)
    stored = StoredTensors(directory, file)
    assemblies = tensors(stored.shapes)
    params = {canonical_name(n, p): BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    targets = _within(_named(params, names), within)
    prefix = getattr(model.get_submodule(within.removesuffix(".")), "base_model_prefix", "")
    buffers = _within({n: BoxedTensor.from_param(b) for n, b in _buffers(model).items()}, within)
    targets |= {name: boxed for name, boxed in buffers.items() if _find([name], assemblies, prefix)}
    aliases = _aliases(model, lambda name: (names(name) or "").removeprefix(within))
    chosen: dict[str, Assembly] = {}
    rows, absent = [], []
    for name, boxed in targets.items():
        assembly = _find(aliases.get(name, [name]), assemblies, prefix)
        if assembly is None and not strict:
            absent.append(name)
            continue
        if assembly is None or assembly.shape != boxed.global_shape:
            rows.append(f"{name}: this model {boxed.global_shape}, directory {_described(assembly)}")
            continue
        dtypes = {stored.dtype(source) for source in assembly.sources}
        if wrong := sorted(dtype for dtype in dtypes if not _converts(dtype, boxed.dtype)):
            rows.append(f"{name}: {wrong[0]} in the directory, which needs a scale to be {boxed.dtype}")
        chosen[name] = assembly
    if rows:
        raise CheckpointError(
            f"{directory} holds another model: {len(rows)} of {len(targets)} parameters differ",
            got="\n             ".join(rows[:SHOWN]),
            fix="check that config.json is the one these weights were made with",
        )
    for name, assembly in chosen.items():
        _fill(targets[name], assembly, stored)
    note_writes()
    return absent


def _fill(boxed: BoxedTensor, assembly: Assembly, stored: StoredTensors) -> None:
    """Read what a rank has of a tensor."""
    for box, view in boxed.pieces:
        for part in assembly.parts:
            if (inside := part.box.intersect(box)) is not None:
                values = stored.read(part.source, part.region(inside))
                view[inside.within(box)].copy_(part.arranged(values))


def _described(assembly: Assembly | None) -> str:
    if assembly is None:
        return "nothing"
    sources = assembly.sources
    return str(assembly.shape) + (
        f", of {len(sources)} tensors up to {sources[-1]}" if len(sources) > 1 else ""
    )


def _converts(stored: str, dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype of safetensors are those of another as they are."""
    return not dtype.is_floating_point or stored in FLOATS or stored == _DTYPES.get(dtype)


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that a state dict holds, by name, and that are in memory."""
    persistent = {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in persistent.items() if not buffer.is_meta}


def _within(boxes: Mapping[str, BoxedTensor], prefix: str) -> dict[str, BoxedTensor]:
    return {name.removeprefix(prefix): boxed for name, boxed in boxes.items() if name.startswith(prefix)}


def _named(boxes: Mapping[str, BoxedTensor], names: Callable[[str], str | None]) -> dict[str, BoxedTensor]:
    pairs = ((names(name), boxed) for name, boxed in boxes.items())
    return {name: boxed for name, boxed in pairs if name is not None}


def _aliases(model: nn.Module, name_in_files: Callable[[str], str]) -> dict[str, list[str]]:
    """Every name that the files may have for a parameter, by its first, which is canonical."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first = canonical_name(name, param)
        names.setdefault(id(param), [name_in_files(first)]).append(name_in_files(name))
    return {aliases[0]: aliases for aliases in names.values()}


def _find(names: Sequence[str], assemblies: Mapping[str, Assembly], prefix: str) -> Assembly | None:
    """Return what a tensor of these names is made of; None: the files lack it."""
    candidates = [
        key for name in names for key in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    ]
    return next((assemblies[key] for key in candidates if key in assemblies), None)


@dataclass(frozen=True)
class _Entry:
    """One tensor of an export: its file and where its bytes begin in that file's data."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save_hf(
    model: nn.Module,
    directory: str | os.PathLike,
    *,
    weights: Mapping[str, BoxedTensor] | None = None,
    dtype: torch.dtype | None = None,
    within: str = "",
    names: Callable[[str], str | None] = _same,
    tensors: Callable[[Mapping[str, Sequence[int]]], Mapping[str, Assembly]] = unchanged,
    max_file_bytes: int = 5 * 1000**3,
) -> None:
    """Write a directory that `from_pretrained` of transformers or diffusers opens. Collective.

    Args:
        model: its parameters and the buffers of its state dict are written, and its `config` (and
            `generation_config`) saved where it has them.
        directory: new, or empty; seen by all ranks. It appears whole or not at all.
        weights: boxes to write in place of the model's parameters of those names (master weights).
        dtype: the dtype of floating-point tensors; None keeps each tensor's.
        within: write only what has names that begin so, without it: `model.get_submodule` of it, with its config.
        names: the files' name of a parameter of that name; None: it is not written.
        tensors: a function of the shapes of the model's tensors that returns what the files' are made of, by the
            files' name; the same on all ranks.
        max_file_bytes: a file holds at least one tensor and otherwise no more than this.

    A tied parameter is written once, under its canonical name. Raises `CheckpointError` when the directory is not
    empty or a rank cannot write.
    """
    final = Path(directory)
    group = control_group()
    boxes = {canonical_name(n, p): BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    boxes |= {name: BoxedTensor.from_param(buffer) for name, buffer in _buffers(model).items()}
    replaced = set().union(
        *all_gather_object(set(weights or ()), group)
    )  # a rank may hold no part of some of them
    boxes = {name: boxed for name, boxed in boxes.items() if name not in replaced}
    boxes = _within(_named(boxes | dict(weights or {}), names), within)
    model = model.get_submodule(within.removesuffix("."))
    present = _everyones(boxes, group)
    files = tensors({name: shape for name, (shape, _) in present.items()})
    entries = _lay_out(_typed(files, present), dtype, max_file_bytes, _stem(model))
    parts = reversed_parts(files)
    with new_directory(final) as new:
        new.write(lambda: _write_headers(new.temporary, entries), first=True)
        new.write(lambda: _write_boxes(new.temporary, entries, boxes, parts, _unshared(boxes, group)))
        new.write(lambda: _write_beside(model, new.temporary, entries), first=True)


def _everyones(boxes: Mapping[str, BoxedTensor], group: dist.ProcessGroup | None):
    """Shape and dtype of every tensor of the job, by name."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for rank_tensors in all_gather_object({n: (b.global_shape, b.dtype) for n, b in boxes.items()}, group):
        for name, what in rank_tensors.items():
            tensors.setdefault(name, what)
    return tensors


def _typed(files: Mapping[str, Assembly], present: Mapping[str, tuple[tuple[int, ...], torch.dtype]]):
    """Shape and dtype of every tensor of the files, by name."""
    return {
        name: (
            assembly.shape,
            reduce(torch.promote_types, [present[source][1] for source in assembly.sources]),
        )
        for name, assembly in files.items()
    }


def _unshared(boxes: Mapping[str, BoxedTensor], group: dist.ProcessGroup | None):
    """This rank's boxes that no lower rank holds too, by name."""
    rank = dist.get_rank() if group is not None else 0
    mine = {name: [box for box, _ in boxed.pieces] for name, boxed in boxes.items()}
    lower = all_gather_object(
        {(name, box) for name, rank_boxes in mine.items() for box in rank_boxes}, group
    )[:rank]
    lower_boxes = set().union(*lower)
    return {
        name: {box for box in rank_boxes if (name, box) not in lower_boxes}
        for name, rank_boxes in mine.items()
    }


def _stem(model: nn.Module) -> str:
    """Return the beginning of a model's file names: diffusers' models write their configs themselves."""
    return DIFFUSERS if hasattr(model, "save_config") else TRANSFORMERS


def _lay_out(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    dtype: torch.dtype | None,
    limit: int,
    stem: str,
) -> dict[str, _Entry]:
    groups: list[list[str]] = [[]]
    used = 0
    dtypes = {
        n: dtype if dtype and stored_dtype.is_floating_point else stored_dtype
        for n, (_, stored_dtype) in tensors.items()
    }
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, (shape, _) in tensors.items()}
    for name in sorted(tensors):
        if groups[-1] and used + sizes[name] > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += sizes[name]
    entries: dict[str, _Entry] = {}
    for number, names in enumerate(groups, start=1):
        part = "" if len(groups) == 1 else f"-{number:05d}-of-{len(groups):05d}"
        file = f"{stem}{part}.safetensors"
        start = 0
        for name in names:
            entries[name] = _Entry(file, dtypes[name], tensors[name][0], start)
            start += sizes[name]
    return entries


def _by_file(entries: Mapping[str, _Entry]) -> dict[str, dict[str, _Entry]]:
    files: dict[str, dict[str, _Entry]] = {}
    for name, entry in entries.items():
        files.setdefault(entry.file, {})[name] = entry
    return files


def _header(entries: Mapping[str, _Entry]) -> bytes:
    """The safetensors header: its length, then JSON of dtype, shape and byte range, padded to 8 bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, e in entries.items():
        table[name] = {
            "dtype": _DTYPES[e.dtype],
            "shape": list(e.shape),
            "data_offsets": [e.start, e.start + e.nbytes],
        }
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_headers(directory: Path, entries: Mapping[str, _Entry]) -> None:
    for file, file_entries in _by_file(entries).items():
        header = _header(file_entries)
        with (directory / file).open("wb") as out:
            out.write(header)
            out.truncate(len(header) + sum(e.nbytes for e in file_entries.values()))


def _write_boxes(
    directory: Path,
    entries: Mapping[str, _Entry],
    boxes: Mapping[str, BoxedTensor],
    parts: Mapping[str, Sequence[Part]],
    mine: Mapping[str, Container[Box]],
) -> None:
    """Write those boxes of each tensor that are `mine`, in the order given; what is lent is asked for once."""
    maps: dict[str, np.memmap] = {}
    begins = {file: len(_header(inside)) for file, inside in _by_file(entries).items()}

    def stored(name: str) -> torch.Tensor:
        entry = entries[name]
        if entry.file not in maps:
            maps[entry.file] = np.memmap(directory / entry.file, dtype=np.uint8, mode="r+")
        begin = begins[entry.file] + entry.start
        raw = torch.from_numpy(maps[entry.file][begin : begin + entry.nbytes])
        return raw.view(entry.dtype).view(entry.shape)

    for name, boxed in boxes.items():
        if math.prod(boxed.global_shape) == 0 or not mine[name]:
            continue
        dtype = entries[parts[name][0].source].dtype
        for box, view in boxed.present.pieces:
            if box not in mine[name]:
                continue
            values = view.detach().to("cpu", dtype)
            for part in parts[name]:
                if (inside := part.box.intersect(box)) is not None:
                    region = stored(part.source)[part.region(inside).slices()]
                    part.arranged(region).copy_(values[inside.within(box)])
    for mapped in maps.values():
        mapped.flush()


def _write_beside(model: nn.Module, directory: Path, entries: Mapping[str, _Entry]) -> None:
    """Index and configs."""
    files = _by_file(entries)
    if len(files) > 1:
        total = sum(e.nbytes for e in entries.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: e.file for n, e in sorted(entries.items())},
        }
        (directory / index_name(_stem(model))).write_text(json.dumps(index, indent=1))
    if hasattr(model, "save_config"):  # of diffusers
        model.save_config(directory)  # type: ignore[operator]
        return
    config = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.save_pretrained(directory)
    generation = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(directory)
