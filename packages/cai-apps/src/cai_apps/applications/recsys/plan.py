"""What a recommendation run will need: nearly all of it is tables."""

from __future__ import annotations

from cai_apps.applications.recsys.config import RecsysConfig
from cai_mesh.errors import ConfigError

FLOAT = 4
"""Bytes of a value; row-wise Adagrad keeps one more value a row."""


def plan(config: RecsysConfig, ranks: int | None, label: str, memory: int | None) -> str:
    """The tables' bytes on host and device, as text. Raises `ConfigError` for more than one rank."""
    if ranks not in (None, 1):
        raise ConfigError("a recommendation recipe trains in one process", got=f"--ranks {ranks}")
    tables = config.tables
    host = tables.count * tables.rows * (tables.dim + 1) * FLOAT
    device = tables.count * int(tables.rows * tables.cache) * (tables.dim + 1) * FLOAT
    fits = (
        ""
        if memory is None
        else f": {'fits' if device <= memory else 'does NOT fit'} {memory / 2**20:,.1f} MiB"
    )
    return "\n".join(
        [
            f"{label}: DLRM, {tables.count} tables of {tables.rows:,} rows of {tables.dim}",
            f"host      {host / 2**20:,.1f} MiB of rows, with their optimizer's state",
            f"device    {device / 2**20:,.1f} MiB of them cached, {tables.cache:.0%}; MLPs are small{fits}",
        ]
    )
