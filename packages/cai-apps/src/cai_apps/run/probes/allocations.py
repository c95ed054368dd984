"""What was in a GPU's memory when most of it was taken, from a snapshot of torch's allocator: pure functions.

A snapshot (`torch.cuda.memory._snapshot`) has the blocks that are there at its end, and the allocations and frees
before it, as far back as a ring of them reaches. Going back through those gives what was there at each moment.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ALLOCATED, FREED, OUT_OF_MEMORY = "alloc", "free_completed", "oom"
"""Actions of an allocator's history."""
FOREIGN = (f"{Path(torch.__file__).parent}/", "<frozen", "<string>")
"""Beginnings of the names of files whose lines say less than those that call them."""
BEFORE = "before the history begins"
UNKNOWN = "no line of Python: in backward, or in a library"

Frames = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Site:
    """Memory that one line has taken.

    Args:
        place: the line, as "llama/modeling_llama.py:176 forward".
        code: its text, where it can be read.
        caller: the line of another package that led there; "" for none.
        bytes: the bytes of all its blocks.
        count: the number of its blocks.
    """

    place: str
    code: str
    caller: str
    bytes: int
    count: int


@dataclass(frozen=True)
class Fullest:
    """The fullest moment of a history.

    Args:
        bytes: the bytes that were allocated then.
        sites: the lines that had allocated them, the largest first.
    """

    bytes: int
    sites: tuple[Site, ...]


def fullest(snapshot: Mapping[str, Any], device: int) -> Fullest:
    """Return the moment at which most was allocated on a device.

    Args:
        snapshot: a snapshot of torch's allocator, with its history.
        device: the number of the device.
    """
    events = [e for e in _history(snapshot, device) if e["action"] in (ALLOCATED, FREED)]
    at_end = {
        block["address"]: (int(block["size"]), block.get("frames") or ())
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in _addressed(segment)
        if block["state"].startswith("active")
    }
    blocks = _at_begin(at_end, events)
    for event in events[: _fullest_place(blocks, events)]:
        _apply(blocks, event)
    return Fullest(sum(size for size, _ in blocks.values()), _by_site(blocks.values()))


def out_of_memory(snapshot: Mapping[str, Any], device: int) -> tuple[int, int] | None:
    """Return the bytes that could not be had, and those that were free, of the last such event; None: there is none."""
    events = [event for event in _history(snapshot, device) if event["action"] == OUT_OF_MEMORY]
    return (int(events[-1]["size"]), int(events[-1].get("device_free", 0))) if events else None


def _history(snapshot: Mapping[str, Any], device: int) -> Sequence[Mapping[str, Any]]:
    histories = snapshot.get("device_traces") or ()
    return histories[device] if device < len(histories) else ()


def _addressed(segment: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Yield the blocks of a segment with their addresses, which older snapshots leave to be added up."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield {"address": address, **block}
        address += block["size"]


def _fullest_place(blocks: Mapping[int, tuple[int, Frames]], events: Sequence[Mapping[str, Any]]) -> int:
    """Return how many events come before the fullest moment."""
    current = dict(blocks)
    most = total = sum(size for size, _ in current.values())
    fullest_place = 0
    for place, event in enumerate(events, start=1):
        total += _apply(current, event)
        if total > most:
            most, fullest_place = total, place
    return fullest_place


def _at_begin(
    at_end: Mapping[int, tuple[int, Frames]], events: Sequence[Mapping[str, Any]]
) -> dict[int, tuple[int, Frames]]:
    """Return the blocks that were there before a history."""
    blocks = dict(at_end)
    for event in reversed(events):
        if event["action"] == ALLOCATED:
            blocks.pop(event["addr"], None)
        else:
            blocks[event["addr"]] = (int(event["size"]), ())
    return blocks


def _apply(blocks: dict[int, tuple[int, Frames]], event: Mapping[str, Any]) -> int:
    """Change the blocks by an event; return the change of their bytes."""
    if event["action"] == FREED:
        size, _ = blocks.pop(event["addr"], (0, ()))
        return -size
    blocks[event["addr"]] = (int(event["size"]), event.get("frames") or ({"name": UNKNOWN},))
    return int(event["size"])


def _by_site(blocks: Iterable[tuple[int, Frames]]) -> tuple[Site, ...]:
    sizes: dict[tuple[str, str, str], list[int]] = {}
    for size, frames in blocks:
        sizes.setdefault(_site(frames), []).append(size)
    sites = [Site(*lines, sum(several), len(several)) for lines, several in sizes.items()]
    return tuple(sorted(sites, key=lambda site: site.bytes, reverse=True))


def _site(frames: Frames) -> tuple[str, str, str]:
    """Return the innermost line that is none of torch, its text, and the next one outwards of another package."""
    if not frames:
        return BEFORE, "", ""
    lines = [frame for frame in frames if "line" in frame]
    if not lines:
        return UNKNOWN, "", ""
    outer = [frame for frame in lines if not str(frame["filename"]).startswith(FOREIGN)] or lines
    package = _package(outer[0])
    caller = next((_place(frame) for frame in outer if _package(frame) != package), "")
    return _place(outer[0]), linecache.getline(outer[0]["filename"], int(outer[0]["line"])).strip(), caller


def _place(frame: Mapping[str, Any]) -> str:
    return f"{'/'.join(str(frame['filename']).split('/')[-2:])}:{frame['line']} {frame['name']}"


def _package(frame: Mapping[str, Any]) -> str:
    """Return the name of the package of a line: of a file in a folder of packages the next folder, else its own."""
    parts = str(frame["filename"]).split("/")
    roots = [place for place, part in enumerate(parts[:-1]) if part in ("site-packages", "src")]
    return parts[roots[-1] + 1] if roots else "/".join(parts[:-1])
