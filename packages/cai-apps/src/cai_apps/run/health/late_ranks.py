"""The ranks that the others wait for: what each rank reports of itself, and what follows from all of it.

No communication.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

WAITING = ("torch/distributed/", "cai_mesh/comm/", "torch/cuda/streams.py", "torch/cuda/__init__.py")
"""Parts of paths whose functions wait for other ranks, or for a device that may be waiting for them."""
KEPT = 32
"""Collectives of a group that a rank tells by name: the last ones."""
OWN = "cai "
"""What names of threads begin with that wait for no rank."""


@dataclass(frozen=True)
class Group:
    """How far a rank is in a group of ranks.

    Args:
        ranks: the ranks of the group.
        calls: collectives that this rank has called there. With NCCL the host runs ahead of its device: what it has
            called need not have begun.
        recent: the last of them in their order, as "all_reduce [4]"; "" for one that is not known.
    """

    ranks: tuple[int, ...]
    calls: int
    recent: tuple[str, ...] = ()

    def name(self, number: int) -> str:
        """Return the collective of this number, from 1; "" where it is not known."""
        place = number - 1 - self.calls + len(self.recent)
        return self.recent[place] if 0 <= place < len(self.recent) else ""


@dataclass(frozen=True)
class RankReport:
    """Report of a rank on itself.

    Args:
        step: steps it has done.
        where: the call that it is in, as "sleep at train.py:12".
        waits: whether that is one that waits for other ranks.
        groups: the groups that it is in, by name.
        at: the place that it has reached within a step, such as "the forward of microbatch 0 on stage 1 (1F0)".
    """

    step: int
    where: str
    waits: bool
    groups: Mapping[str, Group] = field(default_factory=dict)
    at: str = ""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str | bytes) -> RankReport:
        table = json.loads(text)
        groups = {
            name: Group(tuple(g["ranks"]), g["calls"], tuple(g["recent"]))
            for name, g in table["groups"].items()
        }
        return RankReport(table["step"], table["where"], table["waits"], groups, table["at"])


def blame(reports: Sequence[RankReport | None]) -> str:
    """Return who did not arrive, and where; a line for each rank that others wait for.

    Args:
        reports: the reports of all ranks in their order; None: a rank gave none.
    """
    silent = [rank for rank, report in enumerate(reports) if report is None]
    if silent:
        who = f"rank{'s' * (len(silent) > 1)} {_listed(silent)}"
        return f"{who}: no sign of life; stopped, or the machine is gone"
    all_reports = [report for report in reports if report is not None]
    if differ := _different(all_reports):
        return differ
    late, ahead = _late(all_reports), _ahead(all_reports)
    missing = [rank for rank in late if not all_reports[rank].waits and rank not in ahead]
    missing = missing or [rank for rank in late if not all_reports[rank].waits] or list(late)
    if missing:
        return "\n".join(
            f"rank {rank} has not arrived at {late[rank]}: {_state(all_reports[rank])}" for rank in missing
        )
    busy = [rank for rank, report in enumerate(all_reports) if not report.waits]
    who = busy if 0 < len(busy) < len(all_reports) else range(len(all_reports))
    return "\n".join(f"rank {rank}: {_state(all_reports[rank])}" for rank in who)


def _groups(reports: Sequence[RankReport]) -> Iterator[dict[int, Group]]:
    """Yield each group, as its ranks tell of it."""
    members_by_group: dict[tuple[str, tuple[int, ...]], dict[int, Group]] = {}
    for rank, report in enumerate(reports):
        for name, group in report.groups.items():  # a name may be that of several groups
            members_by_group.setdefault((name, group.ranks), {})[rank] = group
    for key in sorted(members_by_group):
        yield members_by_group[key]


def _late(reports: Sequence[RankReport]) -> dict[int, str]:
    """Return by rank the first collective that others of a group have called and it has not."""
    awaited_calls: dict[int, str] = {}
    for members in _groups(reports):
        first = max(members, key=lambda rank: members[rank].calls)
        ahead = members[first]
        for rank, group in members.items():
            if group.calls < ahead.calls:
                number = group.calls + 1 if ahead.name(group.calls + 1) else ahead.calls
                which = (
                    f"{ahead.name(number) or 'a collective'}, number {number} of ranks {_listed(ahead.ranks)}"
                )
                awaited_calls.setdefault(rank, f"{which}, where rank {first} waits")
    return awaited_calls


def _ahead(reports: Sequence[RankReport]) -> set[int]:
    """Return the ranks that have called what another of a group has not: they, or their devices, wait for that one."""
    ranks_ahead: set[int] = set()
    for members in _groups(reports):
        least = min(group.calls for group in members.values())
        ranks_ahead |= {rank for rank, group in members.items() if group.calls > least}
    return ranks_ahead


def _different(reports: Sequence[RankReport]) -> str:
    """Return the first collective of a group that its ranks have called, and not as the same operation."""
    for members in _groups(reports):
        reached = min(group.calls for group in members.values())
        for number in range(max(1, reached - KEPT + 1), reached + 1):
            names = {rank: group.name(number) for rank, group in members.items()}
            if len({name.partition(" ")[0] for name in names.values() if name}) > 1:
                called = ", ".join(f"rank {rank} {name}" for rank, name in names.items() if name)
                ranks = _listed(next(iter(members.values())).ranks)
                return f"the ranks have called different collectives: {called}, as number {number} of ranks {ranks}"
    return ""


def _state(report: RankReport) -> str:
    at = f"at {report.at}, " if report.at else ""
    return f"after step {report.step} it is {at}in {report.where}"


def _listed(ranks: Sequence[int]) -> str:
    listing = ", ".join(map(str, ranks[:8]))
    return listing if len(ranks) <= 8 else f"{listing} and {len(ranks) - 8} more"


def look(step: int, at: str) -> RankReport:
    """Return what this rank is doing: `step` steps are done, and within the next one it is at `at`."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = {
        ident: traceback.extract_stack(frame)
        for ident, frame in sys._current_frames().items()
        if not threads.get(ident, "").startswith(OWN)
    }
    waiting = next((stack for stack in stacks.values() if _waits(stack)), None)
    stack = waiting or stacks.get(main or 0) or []
    return RankReport(step, _place(stack), waiting is not None, _groups_if_told(), at)


def _groups_if_told() -> dict[str, Group]:
    """Return `groups()`, or nothing where the recorder fails or has another form: what else is known is told anyway."""
    try:
        return groups()
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError):
        return {}


def _waits(stack: Sequence[traceback.FrameSummary]) -> bool:
    return any(part in frame.filename.replace("\\", "/") for frame in stack[-3:] for part in WAITING)


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost call, and the line that is there."""
    if not stack:
        return "a place that is not known"
    frame = stack[-1]
    line = f": {frame.line}" if frame.line else ""
    return f"{frame.name} at {frame.filename}:{frame.lineno}{line}"


def groups() -> dict[str, Group]:
    """Return this rank's groups and its place in each, by torch's flight recorder; without those it has forgotten."""
    called: dict[str, dict[int, str]] = {}
    entries, forgets = _recorded()
    for entry in entries:
        if not entry.get("is_p2p"):
            what = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
            sizes = " ".join(map(str, entry.get("input_sizes", ())))
            called.setdefault(entry["process_group"][0], {})[entry["collective_seq_id"]] = (
                f"{what} {sizes}".strip()
            )
    members = {
        str(name): tuple(dist.get_process_group_ranks(g)) for g, name in c10d._world.pg_names.items() if g
    }
    groups_by_name = {name: Group(ranks, 0) for name, ranks in members.items() if not forgets}
    for name in called.keys() & members.keys():
        calls = max(called[name])
        numbers = range(max(min(called[name]), calls - KEPT + 1), calls + 1)
        groups_by_name[name] = Group(members[name], calls, tuple(called[name].get(n, "") for n in numbers))
    return groups_by_name


def _recorded() -> tuple[list[dict[str, Any]], bool]:
    """Return what the flight recorders of gloo and NCCL hold, oldest first, and whether one has forgotten something."""
    import torch._C._distributed_c10d as native

    traces: list[list[dict[str, Any]]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(native, name, None)
        traces.append(json.loads(dump(True, False)).get("entries", []) if dump is not None else [])
    entries = [entry for trace in traces for entry in trace]
    return entries, not entries or any(trace[0]["record_id"] > 0 for trace in traces if trace)
