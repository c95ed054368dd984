"""When, where and by which command a run was started, and how long it took: rows of its page."""

from __future__ import annotations

from datetime import datetime
from typing import Any

DAY, HOUR, MINUTE = 86400, 3600, 60


def fact_rows(starts: list[dict[str, Any]], records: list[dict]) -> list[tuple[str, str]]:
    """Return rows (name, value) about a run.

    Args:
        starts: its starts, as `read_starts` returns them.
        records: the records of its steps.
    """
    rows: list[tuple[str, str]] = []
    if starts:
        last = starts[-1]
        rows.append(("started", ", then again ".join(_moment(start) for start in starts)))
        rows.append(("command", str(last.get("command", "unknown"))))
        rows.append(("machine", _machine(last)))
        rows.append(("versions", _versions(last)))
    return [*rows, ("time in steps", took(records))] if took(records) else rows


def when(starts: list[dict[str, Any]]) -> str:
    """The moment of a run's first start; "" where it is not known."""
    return _moment(starts[0]) if starts else ""


def took(records: list[dict]) -> str:
    """The steps of a run and the time they took; "" where it is not known."""
    seconds = [
        record["step_seconds"] for record in records if isinstance(record.get("step_seconds"), int | float)
    ]
    return f"{len(seconds):,} steps in {duration(sum(seconds))}" if seconds else ""


def on_cpu(starts: list[dict[str, Any]]) -> bool:
    """Whether the last start of a run was on a CPU; a run whose start is not known is taken for one on GPUs."""
    return bool(starts) and starts[-1].get("device") == "cpu"


def _moment(start: dict[str, Any]) -> str:
    try:
        moment = datetime.fromisoformat(str(start.get("at"))).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        moment = "at an unknown time"
    step = start.get("step")
    return f"{moment} from step {step}" if isinstance(step, int) and step else moment


def _machine(start: dict[str, Any]) -> str:
    ranks, device = start.get("ranks", "?"), start.get("gpu") or f"CPU, {start.get('cores', '?')} cores"
    return f"{start.get('host', 'unknown')}: {ranks} rank{'s' * (ranks != 1)} on {device}; {start.get('system', '')}"


def _versions(start: dict[str, Any]) -> str:
    versions = start.get("versions")
    named = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    git = start.get("git")
    if isinstance(git, dict):
        named.append(f"commit {str(git.get('commit'))[:12]}{' with changes' * bool(git.get('dirty'))}")
    return ", ".join(named)


def duration(seconds: float) -> str:
    """Seconds in words: "2 d 3 h", "1 h 5 min", "12 min 3 s", "4.2 s"."""
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    for unit, name, below, its_name in (
        (DAY, "d", HOUR, "h"),
        (HOUR, "h", MINUTE, "min"),
        (MINUTE, "min", 1, "s"),
    ):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name} {int(seconds % unit // below)} {its_name}"
    return f"{seconds:.1f} s"
