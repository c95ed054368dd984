"""One record per step, appended to metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cai_apps.config.places import check_regular
from cai_apps.run.files.position import Position, Unit
from cai_mesh.errors import DataError
from cai_mesh.files import appended, write_text


@dataclass(frozen=True)
class Metrics:
    """What is known after an optimizer step. Times in seconds, memory in bytes."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over what the global batch counts (target tokens, images), before the update."""
    grad_norm: float
    """Global norm before clipping; not finite where float16 overflowed and the step was left out."""
    lr: float
    unit: str
    """What `units` are: tokens, images. Records name both numbers by it."""
    units: int
    """Units of the run so far, over all ranks."""
    units_per_second: float
    """Throughput over all ranks."""
    tflops: float | None
    """TFLOP/s of one rank, attention counted causally, no recompute counted; None where nobody counts."""
    shares: Mapping[str, float | None]
    """TFLOP/s over the device's bf16 peak, by convention ("mfu", "mfu_full_attention"); None: the peak is not known."""
    memory_bytes: int
    """Peak of the rank that holds most, as of this step's backward: allocated on a GPU, resident on the CPU."""
    step_seconds: float
    """Seconds from the wait of the step before to this one's."""
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    """Part of the targets that were the likeliest of all."""
    validation_perplexity: float | None = None
    routing: Mapping[str, float] = field(default_factory=dict)
    """What routers of a mixture of experts say of the step, by name (`Balance.numbers`)."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """What the loss measures beside, by name, means over the global batch."""
    validation_measures: Mapping[str, float] = field(default_factory=dict)
    """The same of a validation, by names that begin with `VALIDATION`."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts after a validation by name, which are no part of the record."""
    device_bytes: int | None = None
    """Training state that stays on the device of rank 0 between uses; None without offload."""
    host_bytes: int | None = None
    """The same in its host memory."""

    @property
    def left_out(self) -> bool:
        """Whether the step changed no weight, as float16 overflowed: a checkpoint before it is as new."""
        return not math.isfinite(self.grad_norm)

    def record(self) -> dict[str, Any]:
        """The line of metrics.jsonl."""
        values = {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm if math.isfinite(self.grad_norm) else None,
            "lr": self.lr,
            self.unit: self.units,
            f"{self.unit}_per_second": self.units_per_second,
            "tflops": self.tflops,
            **self.shares,
            "memory_bytes": self.memory_bytes,
            "step_seconds": self.step_seconds,
            **self.routing,
            **self.measures,
            **self.validation_measures,
        }
        later = {name: getattr(self, name) for name in OPTIONAL}
        return values | {name: value for name, value in later.items() if value is not None}


PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 peak by a part of the device's name (vendor data sheets)."""

LARGEST_LOSS = 709.0
"""A loss above has no perplexity in float64."""
OPTIONAL = ("validation_loss", "validation_accuracy", "validation_perplexity", "device_bytes", "host_bytes")
"""Fields that are left out of a record where they are None."""


class Speed:
    """Throughput of a run.

    Args:
        unit: the unit that it is counted in.
        ranks: the number of ranks of the run.
        peak: FLOP/s of a rank's device at most; None: not known.
    """

    def __init__(self, unit: Unit, ranks: int, peak: float | None):
        self._unit, self._ranks, self._peak = unit, ranks, peak

    def metrics(
        self, position: Position, samples: int, seconds: float, flops: Mapping[str, float], **numbers: Any
    ) -> Metrics:
        """Metrics of a step that took `samples` samples and so many seconds.

        Args:
            position: the position after the step.
            samples: the number of samples, over all ranks.
            seconds: the time that it took.
            flops: FLOPs of all of it, by convention; the first is reported as TFLOP/s.
            numbers: other fields.
        """
        rates = {name: count / seconds / self._ranks for name, count in flops.items()}
        return Metrics(
            step=position.step,
            unit=self._unit.name,
            units=position.units,
            units_per_second=samples * self._unit.per_sample / seconds,
            tflops=next(iter(rates.values())) / 1e12 if rates else None,
            shares={name: rate / self._peak if self._peak else None for name, rate in rates.items()},
            step_seconds=seconds,
            **numbers,
        )


class Records:
    """Appends records of steps to a file, each on a line of its own and flushed."""

    def __init__(self, path: Path, *, from_step: int = 0):
        """Keeps the records up to `from_step` that an earlier part of the run left, and drops later ones.

        What is kept is there at every moment.
        """
        before = read(path) if path.exists() else []
        self.before = max((record["step"] for record in before), default=0)
        """The last step of which there was a record."""
        records = [record for record in before if record["step"] <= from_step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in records))
        self._path, self._file = path, appended(path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a line. Raises `DataError` where the disk takes no more."""
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"{self._path} cannot be written",
                got=f"step {record['step']}",
                cause=error.strerror or str(error),
                fix="make room; the run goes on from its newest checkpoint",
            ) from None

    def close(self) -> None:
        with suppress(OSError):  # a line that a full disk did not take has been told
            self._file.close()


def read(path: Path) -> list[dict]:
    """The records of a metrics.jsonl.

    Raises:
        DataError: the file is missing or a line is not a record.
    """
    records = []
    check_regular(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(
            f"no metrics at {path}", expected="the directory of a run that has trained a step"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text", cause=str(error), expected="a record a line") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and isinstance(error, ValueError):
                break  # a run killed in the middle of a write leaves half a last line
            raise DataError(f"broken record at {path}:{number}", cause=str(error)) from None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise DataError(
                f"broken record at {path}:{number}", got=line[:80], expected='a table with "step"'
            )
        records.append(record)
    return records


def need(records: list[dict], numbers: Sequence[str], maybe: Sequence[str] = ()) -> None:
    """Raises DataError where a record lacks a number, or there is none; numbers of `maybe` may be left out or null."""
    if not records:
        raise DataError(
            "metrics.jsonl has no record", expected="the directory of a run that has trained a step"
        )
    for record in records:
        wrong = [key for key in numbers if not isinstance(record.get(key), int | float)]
        wrong += [key for key in maybe if not isinstance(record.get(key), int | float | None)]
        if wrong:
            raise DataError(
                f"metrics.jsonl has a record without {', '.join(wrong)}",
                got=str(record)[:200],
                expected=f"what training of this kind writes: {', '.join(numbers)}",
            )


def perplexity(loss: float) -> float | None:
    """The perplexity of a mean loss of tokens; None where it is out of the range of numbers."""
    return math.exp(loss) if loss < LARGEST_LOSS else None


def peak_flops(device: torch.device) -> float | None:
    """bf16 peak of a known GPU in FLOP/s; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
