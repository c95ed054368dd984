"""Protocol of a tracker's writer, and the identity of the run that it writes of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Identity:
    """A run as trackers know it.

    Args:
        id: a name that no other run has, the same for all starts of this one.
        name: the name of its directory.
        project: the name of what it belongs to; None: the tracker's own variable of the environment says so, or "cai".
        directory: the directory of the run.
        first_step: the first step that this start trains.
    """

    id: str
    name: str
    project: str | None
    directory: Path
    first_step: int = 1

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.first_step > 1


class Writer(Protocol):
    """What is written to a tracker, from one thread. Any method may raise, or not return."""

    def start(self, config: Mapping[str, Any], identity: Identity) -> None:
        """Begin or resume a run; `config` has plain values, and tables of them, alone."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step by name. Steps come in their order."""

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text of a step, after its numbers."""

    def finish(self) -> None:
        """Write what is still to be written, and end."""


def as_markdown(text: str) -> str:
    """Return a text for a reader of Markdown, who is to see it as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
