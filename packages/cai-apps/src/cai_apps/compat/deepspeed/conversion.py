"""Converts a DeepSpeed json: each key is a key of cai, follows from others, changes nothing, or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cai_apps.compat.deepspeed.rows import NOTHING, OPTIMIZERS, SAME, SECTIONS, WORKED_OUT
from cai_mesh.errors import ConfigError, did_you_mean

Tables = dict[str, Any]


@dataclass(frozen=True)
class Converted:
    """A config of cai, and what of the other one is not in it.

    Args:
        tables: sections of a config, nested.
        notes: lines about keys that change nothing, and that mean something else.
    """

    tables: Tables
    notes: list[str]

    def toml(self) -> str:
        """Return the sections as a TOML file."""
        lines = [f"# {note}" for note in self.notes]
        return "\n".join([*lines, *_written(self.tables, "")]).strip() + "\n"


def read(file: Path) -> dict[str, Any]:
    """Return what a DeepSpeed json says.

    Raises:
        ConfigError: there is no such file, or it is no JSON.
    """
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} is no config of DeepSpeed", cause=str(error), expected="a JSON file"
        ) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{file} is no config of DeepSpeed", got=type(table).__name__, expected="a table")
    return table


def converted(table: Mapping[str, Any]) -> Converted:
    """Return a DeepSpeed config in cai's sections. What it says "auto" of is left to cai.

    Args:
        table: the json, nested.

    Raises:
        ConfigError: a key is unknown, or asks for what is not here.
    """
    entries, notes = dict(_flat(table)), list[str]()
    tables: Tables = {}
    for key in entries:
        section = key.split(".")[0]
        if section in SECTIONS:
            notes.append(f"{key}: not here; {SECTIONS[section]}")
        elif key in NOTHING:
            notes.append(f"{key}: no effect; {NOTHING[key]}")
        elif key not in SAME and key not in WORKED_OUT:
            keys = [*SAME, *WORKED_OUT, *NOTHING, *SECTIONS]
            raise ConfigError(f"no key {key!r} of DeepSpeed is known here", fix=did_you_mean(key, keys))
    for key, goal in SAME.items():
        if key in entries and goal != "log.trackers":
            _put(tables, goal, entries[key])
    _put_precision(entries, tables)
    _put_optimizer(entries, tables, notes)
    _put_memory(entries, tables, notes)
    trackers = [name for name in ("tensorboard", "wandb") if entries.get(f"{name}.enabled")]
    if trackers:
        _put(tables, "log.trackers", trackers)
    if tables.get("parallel", {}).get("zero") is not None:
        _put(tables, "parallel.shard", -1)
    return Converted(tables, notes)


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys with dots and their values, but for those that are "auto"."""
    for name, value in table.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        elif value != "auto" and value is not None:
            yield key, value


def _put(tables: Tables, key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        tables = tables.setdefault(part, {})
    tables[name] = value


def _put_precision(entries: Mapping[str, Any], tables: Tables) -> None:
    halves = [name for name in ("bf16", "fp16") if entries.get(f"{name}.enabled")]
    if len(halves) > 1:
        raise ConfigError("bf16 and fp16 are enabled", fix="leave one of them")
    if halves:
        _put(tables, "precision.compute", halves[0])


def _put_optimizer(entries: Mapping[str, Any], tables: Tables, notes: list[str]) -> None:
    kind = entries.get("optimizer.type")
    if kind is not None:
        if str(kind).lower() not in OPTIMIZERS:
            raise ConfigError(f"no optimizer {kind!r} here", fix=did_you_mean(str(kind).lower(), OPTIMIZERS))
        _put(tables, "optimizer.kind", OPTIMIZERS[str(kind).lower()])
    for name, beta in zip(("beta1", "beta2"), entries.get("optimizer.params.betas", ()), strict=False):
        _put(tables, f"optimizer.{name}", beta)
    peak = entries.get("scheduler.params.warmup_max_lr")
    if peak is not None and "optimizer.params.lr" not in entries:
        _put(tables, "optimizer.lr", peak)
    schedule = entries.get("scheduler.type")
    if schedule not in (None, "WarmupCosineLR"):
        notes.append(f"scheduler.type {schedule}: rates go up in a line and down in half a cosine here")


def _put_memory(entries: Mapping[str, Any], tables: Tables, notes: list[str]) -> None:
    zero = "zero_optimization"
    places = {entries.get(f"{zero}.offload_{part}.device", "none") for part in ("optimizer", "param")}
    if unknown := places - {"none", "cpu", "nvme"}:
        raise ConfigError("unknown device of offloading", got=unknown.pop(), expected="cpu, nvme or none")
    if places & {"cpu", "nvme"}:
        _put(tables, "memory.residency", "nvme" if "nvme" in places else "host")
        if entries.get(f"{zero}.stage") != 3:
            notes.append(f"{zero}.stage: 3 here, for state in host memory goes with sharded parameters")
            _put(tables, "parallel.zero", 3)
    for part in ("optimizer", "param"):
        if f"{zero}.offload_{part}.nvme_path" in entries and "nvme" in places:
            _put(tables, "memory.nvme", entries[f"{zero}.offload_{part}.nvme_path"])
    for name in ("weights", "gradients"):
        if entries.get(f"{zero}.zero_quantized_{name}"):
            _put(tables, f"parallel.wire_{name}", "int8")
    section = "activation_checkpointing"
    if entries.get(f"{section}.partition_activations") or entries.get(f"{section}.cpu_checkpointing"):
        _put(tables, "memory.recompute", "full")
    if entries.get(f"{section}.cpu_checkpointing"):
        _put(tables, "memory.activations", "host")


def _written(tables: Mapping[str, Any], path: str) -> Iterator[str]:
    plain = {name: value for name, value in tables.items() if not isinstance(value, Mapping)}
    if plain and path:
        yield f"[{path}]"
    yield from (f"{name} = {json.dumps(value)}" for name, value in plain.items())
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _written(value, f"{path}.{name}" if path else name)
