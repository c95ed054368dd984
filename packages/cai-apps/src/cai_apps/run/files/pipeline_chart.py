"""Charts of a step of a pipeline as it ran, drawn by the rank that has recorded it."""

from __future__ import annotations

from cai_apps.run.files.directory import RunDirectory
from cai_mesh.files import write_text
from cai_pipeline import Timeline, draw


def draw_steps(run: RunDirectory, ran: Timeline, simulated: Timeline) -> None:
    """Draws a step as it ran and as it was to be expected from what its actions took, in seconds, to plots/."""
    write_text(run.plots / "pipeline.svg", draw.svg(ran))
    write_text(run.plots / "pipeline-simulated.svg", draw.svg(simulated))
    write_text(run.plots / "pipeline.trace.json", draw.trace({"ran": ran, "simulated": simulated}))
