"""The pipeline schedule of a run as a picture."""

from __future__ import annotations

from pathlib import Path

from cai_apps.config.sections import RunConfig
from cai_apps.run.directory import RunDirectory
from cai_mesh.paths import write_text
from cai_pipeline import begin_with, draw, place, placement_of, simulate


def draw_pipeline(run: RunDirectory, config: RunConfig) -> Path | None:
    """Draws a step of the schedule, backward twice as long as forward, to plots/pipeline.svg; None for one stage."""
    pipeline = config.parallel.pipeline
    if pipeline.size == 1:
        return None
    held = place(pipeline.size, pipeline.chunks, placement_of(pipeline.schedule, pipeline.chunks))
    timeline = simulate(begin_with(pipeline.schedule, held, pipeline.microbatches or 1))
    path = run.plots / "pipeline.svg"
    write_text(path, draw.svg(timeline))
    return path
