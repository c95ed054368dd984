"""Outcome of a run of the shared loop, printed at its end."""

from __future__ import annotations

from cai_apps.config.sections import RunConfig
from cai_apps.report.pipeline_chart import draw_pipeline
from cai_apps.report.plots import draw_loss
from cai_apps.run.files.directory import RunDirectory
from cai_mesh.checkpoint import latest


def show_outcome(run: RunDirectory, config: RunConfig) -> None:
    """Draw the plots and print where everything is."""
    print(f"run directory  {run.path}")
    print(f"loss plot      {draw_loss(run)}")
    if chart := draw_pipeline(run, config):
        print(f"pipeline chart {chart}")
    if newest := latest(run.checkpoints):
        print(f"checkpoint     {newest}")
    if best := latest(run.best):
        print(f"best           {best}")
