"""Weights & Biases. WANDB_MODE, WANDB_DIR, WANDB_PROJECT, WANDB_ENTITY and the others say where to."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from typing import Any

from cai_apps.run.trackers.writer import Identity


class WeightsAndBiases:
    """Writes a run of wandb, which knows no step twice: what a start trains again is not sent."""

    def start(self, config: Mapping[str, Any], identity: Identity) -> None:
        import wandb

        self._run = wandb.init(
            id=identity.id,
            name=os.environ.get("WANDB_NAME", identity.name),
            project=identity.project or os.environ.get("WANDB_PROJECT", "cai"),
            config=dict(config),
            resume="allow",
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        import wandb

        self._run.log({name: wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step=step)

    def finish(self) -> None:
        self._run.finish()
