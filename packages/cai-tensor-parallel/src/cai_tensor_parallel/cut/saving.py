"""No file holds one rank's part of a model under the name of the whole: writing one is refused."""

from __future__ import annotations

from typing import Any

from cai_mesh.storage import PartState


class CutState(PartState):
    """A cut parameter in a state dict: not even a pickle takes it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.refuse()
