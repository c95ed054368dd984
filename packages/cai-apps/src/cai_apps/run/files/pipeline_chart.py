"""Charts of a step of a pipeline as it ran, drawn by the rank that has recorded it."""

from __future__ import annotations

from cai_apps.run.files.directory import RunDirectory
from cai_mesh.files import write_text
from cai_pipeline import Timeline, draw


def draw_steps(run: RunDirectory, ran: Timeline, simulated: Timeline) -> None:
    """Draws a step as it ran, and below it as it was predicted from what its actions took, in seconds, to plots/."""
    steps = {"as it ran": ran, "as predicted from the time of each action": simulated}
    write_text(run.plots / "pipeline.svg", draw.svg(steps, unit="s"))
    write_text(run.plots / "pipeline.trace.json", draw.trace({"ran": ran, "simulated": simulated}))
