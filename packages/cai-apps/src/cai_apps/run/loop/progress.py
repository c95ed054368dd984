"""How a run shows itself while it trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Protocol

from cai_apps.config.terminal import terminal
from cai_apps.run.loop.metrics import Metrics

RECENT = 10
"""Steps whose mean time gives the ETA."""


class Progress(Protocol):
    def update(self, metrics: Metrics) -> None: ...
    def close(self) -> None: ...


def open_progress(total: int, *, start: int, every: int, shows_load: bool = False) -> Progress:
    """A display for a terminal or, elsewhere, a printed line every `every` steps.

    Args:
        total: the last step.
        start: the steps that are done.
        every: the steps between two printed lines.
        shows_load: whether it has the load of the busiest expert.
    """
    if sys.stdout.isatty():
        return LiveProgress(total, start, shows_load)
    return PlainProgress(total, start, every, shows_load)


class PlainProgress:
    def __init__(self, total: int, start: int, every: int, shows_load: bool = False):
        self._total, self._start, self._every, self._shows_load = total, start, every, shows_load
        self._seconds: deque[float] = deque(maxlen=RECENT)

    def update(self, metrics: Metrics) -> None:
        self._seconds.append(metrics.step_seconds)
        first = metrics.step == self._start + 1
        if not first and metrics.step % self._every and metrics.step != self._total:
            return
        remaining_seconds = fmean(self._seconds) * (self._total - metrics.step)
        line = describe(metrics, self._shows_load)
        print(
            f"step {metrics.step}/{self._total}  {line}  ETA {_clock(remaining_seconds)}",
            flush=True,
        )

    def close(self) -> None:
        pass


class LiveProgress:
    def __init__(self, total: int, start: int, shows_load: bool = False):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        eta = TimeRemainingColumn(elapsed_when_finished=True)
        self._bar = Bar(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[line]}"), eta,
            console=Console(file=terminal()),
        )  # fmt: skip
        self._bar.start()
        self._shows_load = shows_load
        self._task = self._bar.add_task("step", total=total, completed=start, line="")

    def update(self, metrics: Metrics) -> None:
        line = describe(metrics, self._shows_load)
        self._bar.update(self._task, completed=metrics.step, line=line)
        if metrics.validation_loss is not None:
            self._bar.console.print(f"step {metrics.step}  {_validation(metrics)}")

    def close(self) -> None:
        self._bar.stop()


@contextmanager
def counted(total: int, what: str, *, visible: bool = True) -> Iterator[Callable[[int], None]]:
    """How many of `total` things are done, as the function it gives is told: a live bar on a terminal, else lines."""
    if not visible:
        yield lambda done: None
        return
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        with Bar(*columns, console=Console(file=terminal())) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    started = time.monotonic()

    def print_line(done: int) -> None:
        remaining_seconds = (time.monotonic() - started) / done * (total - done)
        print(f"{what} {done}/{total}  ETA {_clock(remaining_seconds)}", flush=True)

    yield print_line


def describe(metrics: Metrics, shows_load: bool = False) -> str:
    """The numbers of a step on one line, with the load of the busiest expert where that is shown."""
    parts = [
        f"loss {metrics.loss:.4f}",
        f"grad norm {metrics.grad_norm:.3f}",
        f"{metrics.units_per_second:,.0f} {metrics.unit}/s",
        f"memory {metrics.memory_bytes / 2**30:.2f} GiB",
    ]
    share = next(iter(metrics.shares.values()), None)
    if share is not None:
        parts.append(f"MFU {share:.1%}")
    if shows_load and "load_worst" in metrics.routing:
        parts.append(f"busiest expert {metrics.routing['load_worst']:.2f}x")
    parts += _first_measure(metrics.measures)
    if metrics.validation_loss is not None:
        parts.append(_validation(metrics))
    return "  ".join(parts)


def _first_measure(measures: Mapping[str, float]) -> list[str]:
    """Return the first of what a loss measures, which says most, if it measures anything."""
    return [f"{name.replace('_', ' ', 1)} {value:.3f}" for name, value in [*measures.items()][:1]]


def _validation(metrics: Metrics) -> str:
    parts = [f"validation loss {metrics.validation_loss:.4f}"]
    if metrics.validation_perplexity is not None:
        parts.append(f"perplexity {metrics.validation_perplexity:,.2f}")
    if metrics.validation_accuracy is not None:
        parts.append(f"accuracy {metrics.validation_accuracy:.2%}")
    return "  ".join([*parts, *_first_measure(metrics.validation_measures)])


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
