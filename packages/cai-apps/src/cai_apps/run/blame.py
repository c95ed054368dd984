"""Which rank the others wait for: what each rank says of itself, and what follows from all of it. No communication."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

WAITING = ("torch/distributed/", "cai_mesh/comm/")
"""Parts of paths whose functions wait for other ranks."""
OWN = "cai "
"""What names of threads begin with that wait for no rank."""


@dataclass(frozen=True)
class Group:
    """How far a rank is in a group of ranks.

    Args:
        ranks: of the group.
        calls: collectives that this rank has called there.
        last: the last of them, as "all_reduce [4]"; empty where it has called none.
    """

    ranks: tuple[int, ...]
    calls: int
    last: str


@dataclass(frozen=True)
class Seen:
    """What a rank says of itself.

    Args:
        step: steps it has done.
        where: the call that it is in, as "sleep at train.py:12".
        waits: whether that is one that waits for other ranks.
        groups: by name, those that it is in.
        at: what it is at within a step, such as "the forward of microbatch 0 on stage 1 (1F0)".
    """

    step: int
    where: str
    waits: bool
    groups: Mapping[str, Group] = field(default_factory=dict)
    at: str = ""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str | bytes) -> Seen:
        told = json.loads(text)
        groups = {name: Group(tuple(g["ranks"]), g["calls"], g["last"]) for name, g in told["groups"].items()}
        return Seen(told["step"], told["where"], told["waits"], groups, told["at"])


def blame(reports: Sequence[Seen | None]) -> str:
    """Who did not arrive, and where; a line for each rank that others wait for.

    Args:
        reports: of all ranks in their order; None: it gave none.
    """
    silent = [rank for rank, seen in enumerate(reports) if seen is None]
    if silent:
        who = f"rank{'s' * (len(silent) > 1)} {_listed(silent)}"
        return f"{who}: no sign of life; stopped, or the machine is gone"
    seen = [each for each in reports if each is not None]
    late = _late(seen)
    missing = [rank for rank in late if not seen[rank].waits] or list(late)
    if missing:
        return "\n".join(
            f"rank {rank} has not arrived at {late[rank]}: {_state(seen[rank])}" for rank in missing
        )
    if differ := _different(seen):
        return differ
    busy = [rank for rank, each in enumerate(seen) if not each.waits]
    who = busy if 0 < len(busy) < len(seen) else range(len(seen))
    return "\n".join(f"rank {rank}: {_state(seen[rank])}" for rank in who)


def _late(seen: Sequence[Seen]) -> dict[int, str]:
    """By rank: the collective that others of a group have called and it has not."""
    found: dict[int, str] = {}
    for name in sorted({name for each in seen for name in each.groups}):
        members = {rank: each.groups[name] for rank, each in enumerate(seen) if name in each.groups}
        first = max(members, key=lambda rank: members[rank].calls)
        ahead = members[first]
        for rank, group in members.items():
            if group.calls < ahead.calls:
                number = f"number {ahead.calls} of ranks {_listed(ahead.ranks)}"
                found.setdefault(rank, f"{ahead.last}, {number}, where rank {first} waits")
    return found


def _different(seen: Sequence[Seen]) -> str:
    """Ranks of a group whose last collectives, alike in number, are not the same operation."""
    for name in sorted({name for each in seen for name in each.groups}):
        members = {rank: each.groups[name].last for rank, each in enumerate(seen) if name in each.groups}
        if len({last.partition(" ")[0] for last in members.values()}) > 1:
            called = ", ".join(f"rank {rank} {last}" for rank, last in members.items())
            return f"the ranks have called different collectives: {called}"
    return ""


def _state(seen: Seen) -> str:
    at = f"at {seen.at}, " if seen.at else ""
    return f"after step {seen.step} it is {at}in {seen.where}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def look(step: int, at: str) -> Seen:
    """What this rank is doing, after so many steps, at this within the next."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = {
        ident: traceback.extract_stack(frame)
        for ident, frame in sys._current_frames().items()
        if not threads.get(ident, "").startswith(OWN)
    }
    waiting = next((stack for stack in stacks.values() if _waits(stack)), None)
    stack = waiting or stacks.get(main or 0) or []
    return Seen(step, _place(stack), waiting is not None, groups(), at)


def _waits(stack: Sequence[traceback.FrameSummary]) -> bool:
    return any(part in frame.filename.replace("\\", "/") for frame in stack[-3:] for part in WAITING)


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost call, and the line that is there."""
    if not stack:
        return "a place that is not known"
    frame = stack[-1]
    line = f": {frame.line}" if frame.line else ""
    return f"{frame.name} at {frame.filename}:{frame.lineno}{line}"


def groups() -> dict[str, Group]:
    """This rank's groups, and how far it is in each, by torch's flight recorder; without those it has forgotten."""
    last: dict[str, dict[str, Any]] = {}
    entries = _recorded()
    for entry in entries:
        if not entry.get("is_p2p"):
            last[entry["process_group"][0]] = entry
    forgets = not entries or entries[0]["record_id"] > 0
    members = {
        str(name): tuple(dist.get_process_group_ranks(g)) for g, name in c10d._world.pg_names.items() if g
    }
    found = {name: Group(ranks, 0, "") for name, ranks in members.items() if not forgets}
    for name in last.keys() & members.keys():
        entry = last[name]
        what = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
        sizes = " ".join(map(str, entry["input_sizes"]))
        found[name] = Group(members[name], entry["collective_seq_id"], f"{what} {sizes}".strip())
    return found


def _recorded() -> list[dict[str, Any]]:
    """What the flight recorders of gloo and NCCL hold, oldest first."""
    import torch._C._distributed_c10d as native

    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(native, name, None)
        if dump is not None:
            entries += json.loads(dump(True, False)).get("entries", [])
    return entries
