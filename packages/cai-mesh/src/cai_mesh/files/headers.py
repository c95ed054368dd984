"""The headers and indices of files of weights, checked before anything else of them is read: headers and indices."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from cai_mesh.errors import CaiError, CheckpointError
from cai_mesh.files.paths import inside

LARGEST = 100 * 1000**2
"""Bytes of a header at most, as the format has it."""
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""The bits of one number, by dtype."""
METADATA = "__metadata__"


class _Wrong(Exception):
    """A fault of a header."""


def check_header(path: Path, *, error: type[CaiError] = CheckpointError) -> dict[str, Any]:
    """The tensors that a file of safetensors tells of: dtype, shape and byte range by name.

    Raises `error`, which names the file and the cause, where the file is missing or cut off, the header is larger
    than the file or than `LARGEST`, is not JSON, has a name twice or an unknown dtype, or where tensors overlap, leave
    a gap, or do not end with the file. No tensor is read.
    """
    try:
        if path.exists() and not path.is_file():
            raise _Wrong("it is no regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise _Wrong(f"its header has {length} bytes, and the file {size}")
            if length > LARGEST:
                raise _Wrong(f"its header has {length} bytes, more than {LARGEST}")
            table = _table(file.read(length))
        _check_ranges(table, size - 8 - length)
    except (_Wrong, OSError) as wrong:
        cause = wrong.strerror if isinstance(wrong, OSError) else str(wrong)
        raise error(
            f"{path} is not a sound file of safetensors",
            cause=cause or "",
            fix="copy or download the file again; do not use it unless you know where it comes from",
        ) from None
    return table


def header_metadata(path: Path) -> dict[str, str]:
    """Return the texts by name that stand beside the tensors in a header that `check_header` has found sound."""
    with path.open("rb") as file:
        table = json.loads(file.read(int.from_bytes(file.read(8), "little"))).get(METADATA)
    return {str(key): str(value) for key, value in table.items()} if isinstance(table, dict) else {}


def weight_map(index: Path, *, error: type[CaiError] = CheckpointError) -> dict[str, str]:
    """Tensor name to file name, as an index of several files has it.

    Raises `error` where it is damaged, or names a file outside its directory.
    """
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = set(where.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise error(
            f"{index} is damaged", expected="JSON with a weight_map of tensors' names to files' names"
        ) from None
    for name in sorted(named, key=str):
        inside(index.parent, name, said_by=index, error=error)
    return where


def check_weights(directory: Path, *, error: type[CaiError] = CheckpointError) -> None:
    """Check every index in a directory, and every file of safetensors there or in an index, for readers not ours."""
    files = set(directory.glob("*.safetensors"))
    for index in sorted(directory.glob("*.safetensors.index*.json")):
        files |= {directory / name for name in weight_map(index, error=error).values()}
    for file in sorted(files):
        check_header(file, error=error)


def _table(raw: bytes) -> dict[str, Any]:
    try:
        table = json.loads(raw, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise _Wrong("its header is not JSON") from None
    if not isinstance(table, dict):
        raise _Wrong("its header is not a table of tensors")
    table.pop(METADATA, None)
    return table


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Wrong(f"its header has {next(n for n in names if names.count(n) > 1)!r} twice")
    return table


def _check_ranges(table: dict[str, Any], data: int) -> None:
    """Raise unless the tensors lie one after another in `data` bytes, each as large as its shape and dtype say."""
    ranges = sorted((*_range(name, entry), name) for name, entry in table.items())
    reached = 0
    for begin, end, name in ranges:
        if begin != reached:
            kind = "overlaps the one before it" if begin < reached else "leaves a gap before it"
            raise _Wrong(f"tensor {name!r} {kind}: it begins at byte {begin}, not {reached}")
        reached = end
    if reached != data:
        where = "outside the file" if reached > data else "before the file does"
        raise _Wrong(f"its tensors end {where}: at byte {reached} of {data}")


def _range(name: str, entry: Any) -> tuple[int, int]:
    """First byte of a tensor, and that behind its last."""
    try:
        bits, shape = BITS[entry["dtype"]], entry["shape"]
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _Wrong(f"tensor {name!r} has no known dtype, shape and byte range: {entry!r}"[:300]) from None
    if not isinstance(shape, list) or not all(_is_count(number) for number in (*shape, begin, end)):
        raise _Wrong(f"tensor {name!r} has a shape or byte range that is none: {entry!r}"[:300])
    if (end - begin) * 8 != math.prod(shape) * bits:
        raise _Wrong(f"tensor {name!r} has {end - begin} bytes, which its shape and dtype do not")
    return begin, end


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 63
