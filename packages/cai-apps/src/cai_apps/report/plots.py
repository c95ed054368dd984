"""Curves of a run."""

from __future__ import annotations

from pathlib import Path

from cai_apps import metrics
from cai_apps.run_directory import RunDirectory


def draw_loss(run: RunDirectory) -> Path:
    """Draws training and validation loss over the steps to plots/loss.png."""
    from matplotlib.figure import Figure

    records = metrics.read(run.metrics)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss per token (nats)")
    axes.plot(
        [record["step"] for record in records], [record["loss"] for record in records], label="training"
    )
    validated = [record for record in records if "validation_loss" in record]
    if validated:
        steps, losses = (
            [record["step"] for record in validated],
            [record["validation_loss"] for record in validated],
        )
        axes.plot(steps, losses, "o-", label="validation")
        axes.legend()
    axes.grid(alpha=0.3)
    path = run.plots / "loss.png"
    figure.savefig(path, dpi=120)
    return path
