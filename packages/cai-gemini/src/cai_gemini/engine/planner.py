"""The planner of an engine: chunks, fractions or rates, and what users tune."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.engine.disk_use import disk_traffic, rates_with_disk
from cai_gemini.engine.engine import Engine, Planner
from cai_gemini.planning.policy import NONE_STREAMABLE, Plan, Sizes, Streamable, fractions
from cai_gemini.planning.simulation import Rates, Step, best_plan
from cai_gemini.planning.tiers import Tiers
from cai_gemini.planning.trace import Trace
from cai_gemini.rates import measure
from cai_gemini.steps.pieces import buffer_bytes
from cai_gemini.steps.streaming import can_stream


@dataclass(frozen=True)
class Tuning:
    """The workings of `offload`, and rates that it would otherwise measure.

    Args:
        overlap: whether host steps run in the background; False: `step` waits for them.
        warmup: optimizer steps that are traced before the plan is made.
        rates: those of the link, the disk and the optimizer; None: measured when the model is offloaded.
        observe: returns the most bytes in use on the device since its last call; None: torch's allocator is asked.
        stream: whether "auto" may stream state: state that lives on the host is stepped on the device, piece by piece.
            `Tiers(streamed=...)` asks for it whatever this says.
        expandable_segments: let torch's allocator map memory page by page from now on, for the whole process, unless
            its environment variable is set: less is lost to holes.
    """

    overlap: bool = True
    warmup: int = 2
    rates: Rates | None = None
    observe: Callable[[], int] | None = None
    stream: bool = True
    expandable_segments: bool = True


def planner(
    tiers: Tiers | None, engine: Engine, chunks: Sequence[OffloadedChunk], budget: int, tuning: Tuning
) -> Planner:
    """The planner of an engine's chunks: by fractions, or (None) by the shortest step, with rates measured now."""
    if tiers is not None:
        shares = (tiers.weights, tiers.state, tiers.streamed)
        return lambda trace, sizes, _passes: fractions(trace, sizes, *shares, _streamable(chunks))
    rates = tuning.rates
    if rates is None:
        rates = rates_with_disk(engine.store, measure(engine.copies.device, engine.worker))

    def shortest(trace: Trace, sizes: Sequence[Sizes], passes: int) -> Plan:
        step = Step(
            [chunk.unit.shard.numel() if chunk.trains else 0 for chunk in chunks],
            passes,
            disk=disk_traffic(chunks),
            streamable=_streamable(chunks) if tuning.stream else NONE_STREAMABLE,
        )
        return best_plan(trace, sizes, budget, rates, step)

    return shortest


def _streamable(chunks: Sequence[OffloadedChunk]) -> Streamable:
    """The chunks that can be streamed now; some that were frozen may be trained since."""
    able = {i: chunk for i, chunk in enumerate(chunks) if can_stream(chunk)}
    return Streamable(frozenset(able), buffer_bytes([*able.values()]))
