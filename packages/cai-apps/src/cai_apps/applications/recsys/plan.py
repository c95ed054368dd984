"""What a recommendation run will need: nearly all of it is tables."""

from __future__ import annotations

from dataclasses import asdict

from cai_apps.applications.recsys.config import RecsysConfig
from cai_apps.planner.shown import Shown
from cai_mesh.errors import ConfigError

FLOAT = 4
"""Bytes of a value; row-wise Adagrad keeps one more value a row."""


def plan(config: RecsysConfig, ranks: int | None, label: str, memory: int | None) -> Shown:
    """The tables' bytes on host and device. Raises `ConfigError` for more than one rank."""
    if ranks not in (None, 1):
        raise ConfigError("a recommendation recipe trains in one process", got=f"--ranks {ranks}")
    tables = config.tables
    host = tables.count * tables.rows * (tables.dim + 1) * FLOAT
    device = tables.count * int(tables.rows * tables.cache) * (tables.dim + 1) * FLOAT
    fits = None if memory is None else device <= memory
    title = f"{label}: DLRM, {tables.count} tables of {tables.rows:,} rows of {tables.dim}"
    verdict = "" if memory is None else f": {'fits' if fits else 'does NOT fit'} {memory / 2**20:,.1f} MiB"
    lines = [
        title,
        f"host      {host / 2**20:,.1f} MiB of rows, with their optimizer's state",
        f"device    {device / 2**20:,.1f} MiB of them cached, {tables.cache:.0%}; MLPs are small{verdict}",
    ]
    facts = {"title": title, "host": host, "device": device, "memory": memory, "fits": fits}
    return Shown("\n".join(lines), facts | {"config": asdict(config)})
