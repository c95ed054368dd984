"""Trackio: a database on this machine, or a Space. TRACKIO_DIR, TRACKIO_PROJECT and TRACKIO_SPACE_ID say where."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cai_apps.run.trackers.writer import Identity, as_markdown


class LocalDatabase:
    """Writes a run of trackio, which goes on by its name and would keep a step twice: what comes again is not sent."""

    def start(self, config: Mapping[str, Any], identity: Identity) -> None:
        import trackio

        self._run = trackio.init(
            project=identity.project or os.environ.get("TRACKIO_PROJECT", "cai"),
            name=f"{identity.name}-{identity.id}",
            config=dict(config),
            resume="allow",
            embed=False,
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        import trackio

        self._run.log({name: trackio.Markdown(as_markdown(text))}, step=step)

    def finish(self) -> None:
        self._run.finish()
