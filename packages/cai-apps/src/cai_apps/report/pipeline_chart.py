"""Chart of the pipeline schedule of a run."""

from __future__ import annotations

from pathlib import Path

from cai_apps.config.sections import RunConfig
from cai_apps.run.files.directory import RunDirectory
from cai_mesh.files import write_text
from cai_pipeline import begin_with, draw, place, placement_of, simulate


def draw_pipeline(run: RunDirectory, config: RunConfig) -> Path | None:
    """The chart of a step in plots/; None for one stage.

    A run of fewer steps than one is recorded after has the schedule alone, each backward twice as long as a forward.
    """
    pipeline = config.parallel.pipeline
    if pipeline.size == 1:
        return None
    path = run.plots / "pipeline.svg"
    if not path.exists():
        placement = place(pipeline.size, pipeline.chunks, placement_of(pipeline.schedule, pipeline.chunks))
        schedule = begin_with(pipeline.schedule, placement, pipeline.microbatches or 1)
        write_text(
            path,
            draw.svg({"the schedule, if a backward takes twice as long as a forward": simulate(schedule)}),
        )
    return path
