"""Rows of a run as text."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
BAR = 0.85  # share of the copy bandwidth


def shares(row: Row, copy: float) -> str:
    """Shares of the copy bandwidth, or TFLOP/s of products."""
    found = []
    for part in ("forward", "backward"):
        if row.get(f"{part}_gbs"):
            found.append(f"{part[0]} {row[f'{part}_gbs'] / copy:4.0%}")
        elif row.get(f"{part}_tflops"):
            found.append(f"{part[0]} {row[f'{part}_tflops']:4.0f}T")
    return " ".join(found)


def line(row: Row, copy: float) -> str:
    """One row."""
    name = f"{row['op']:<22} {row['shape']:<28} {row['form']:<14}"
    if "error" in row:
        return f"{name} {row['error']}"
    extra = "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**30:8.3f} GiB"
    both = f"{row['both_ms']:9.3f}" if "both_ms" in row else " " * 9
    return (
        f"{name}{row['forward_ms']:9.3f}{both} ms  {shares(row, copy):<16}{extra}"
        f"{row['host_forward_us']:7.0f}{row['host_us']:7.0f} us host  {row['timed_by']}"
    )


def _peer(rows: list[Row], key: str) -> tuple[float, str] | None:
    found = [(row[key], row["form"]) for row in rows if key in row and not row["form"].startswith("ours")]
    return min(found) if found else None


def table(rows: list[Row], copy: float) -> str:
    """Of every case: ours, its time over the best peer's, its share of the copy bandwidth; `<` marks what is short."""
    lines = [
        f"{'op':<22} {'shape':<28} {'form':<14}{'fwd ms':>9}{'x peer':>8}{'both ms':>9}{'x peer':>8}  best peer  share"
    ]
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["op"], row["shape"]), []).append(row)
    for (op, shape), group in cases.items():
        for row in (r for r in group if r["form"].startswith("ours")):
            name = f"{op:<22} {shape:<28} {row['form']:<14}"
            if "error" in row:
                lines.append(f"{name} {row['error'][:80]}")
                continue
            text, best, short = name, "", False
            for key in ("forward_ms", "both_ms"):
                peer = _peer(group, key)
                text += f"{row[key]:9.3f}" if key in row else " " * 9
                text += f"{row[key] / peer[0]:8.3f}" if peer and key in row else " " * 8
                if peer and key in row:
                    best, short = peer[1], short or row[key] > 1.03 * peer[0]
            parts = [row[f"{p}_gbs"] / copy for p in ("forward", "backward") if row.get(f"{p}_gbs")]
            short = short or any(part < BAR for part in parts)
            lines.append(f"{text}  {best:<9}  {shares(row, copy)}{' <' if short else ''}")
    return "\n".join(lines)
