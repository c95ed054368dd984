"""Steps on the host of chunks whose state is there: in the background, while the next forward runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cai_gemini.chunk.chunk import OffloadedChunk, Taken
from cai_gemini.memory.copies import Scalar
from cai_gemini.memory.timeline import host_span


class HostSteps:
    """The `Stepper` of chunks whose state is on the host."""

    def step(self, chunks: Sequence[OffloadedChunk], scale: float | Scalar) -> None:
        """Step chunks in order, in the background: each is awaited where it is used."""
        for chunk in chunks:
            job = chunk.take_gradient()
            if job is not None:
                chunk.stepped_by(chunk.worker.submit(_work(chunk, job, scale)))


def _work(chunk: OffloadedChunk, job: Taken, scale: float | Scalar) -> Callable[[], None]:
    """Return the work of the worker's thread for one chunk."""
    gradient, groups, step = job

    def run() -> None:
        ready, factor = gradient.settled(), float(scale)
        chunk.host_weights.wait_until_read()
        chunk.host_weights.refresh()
        with host_span(chunk.copies.recorder, chunk.name):
            step.run(groups, ready, factor, chunk.host_weights.tensor)
        chunk.host_weights.adopt()
        chunk.copies.host.give(ready)

    return run
