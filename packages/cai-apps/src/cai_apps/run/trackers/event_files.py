"""TensorBoard's files of events, in the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cai_apps.run.trackers.writer import Identity, as_markdown
from cai_mesh.files import folder

FOLDER = "tensorboard"
SECONDS = 30
"""Seconds after which what is buffered is written."""


class EventFiles:
    """Writes files of events, which `tensorboard --logdir` shows; a start hides the steps that it trains again."""

    def start(self, config: Mapping[str, Any], identity: Identity) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = folder(identity.directory / FOLDER, mode=0o700)
        # it hides events of this step and later ones, but only where the first of all starts has said its own too
        self._writer = SummaryWriter(str(directory), purge_step=identity.first_step, flush_secs=SECONDS)
        self.text(identity.first_step, "config", json.dumps({**config, "id": identity.id}, indent=2))
        self._writer.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, as_markdown(text), step)

    def finish(self) -> None:
        self._writer.close()
