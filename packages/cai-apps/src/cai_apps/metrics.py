"""One record per step, appended to metrics.jsonl."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cai_mesh.errors import DataError


@dataclass(frozen=True)
class Metrics:
    """What is known after an optimizer step. Times in seconds, memory in bytes."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the target tokens of the global batch, before the update."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    tokens: int
    """Input tokens of the run so far, over all ranks."""
    tokens_per_second: float
    """Over all ranks."""
    tflops: float
    """TFLOP/s of one rank, attention counted causally, no recompute counted."""
    mfu: float | None
    """`tflops` over the device's bf16 peak; None where the peak is not known."""
    mfu_full_attention: float | None
    """The same with the whole attention square counted."""
    memory_bytes: int
    """Peak of the rank that holds most: allocated on a GPU, resident on the CPU."""
    step_seconds: float
    validation_loss: float | None = None
    device_bytes: int | None = None
    """Training state that stays on the device of rank 0 between uses; None without offload."""
    host_bytes: int | None = None
    """The same in its host memory."""


OPTIONAL = ("validation_loss", "device_bytes", "host_bytes")
"""Left out of a record where they are None."""


class MetricsFile:
    """Appends records to a file, each on a line of its own and flushed."""

    def __init__(self, path: Path, *, from_step: int = 0):
        """Keeps the records up to `from_step` that an earlier part of the run left, and drops later ones."""
        kept = [record for record in read(path) if record["step"] <= from_step] if path.exists() else []
        self._file = path.open("w", encoding="utf-8")
        for record in kept:
            self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def write(self, metrics: Metrics) -> None:
        record = {
            key: value for key, value in asdict(metrics).items() if key not in OPTIONAL or value is not None
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[dict]:
    """The records of a metrics.jsonl.

    Raises:
        DataError: the file is missing or a line is not a record.
    """
    records = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(
            f"no metrics at {path}", expected="the directory of a run that has trained a step"
        ) from None
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break  # a run killed in the middle of a write leaves half a last line
            raise DataError(f"broken record at {path}:{number}", cause=str(error)) from None
    return records
