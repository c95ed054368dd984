"""The share of a model that stays on the device and that goes to a disk, as users ask for it."""

from __future__ import annotations

from dataclasses import dataclass

from cai_mesh.errors import PlanError


@dataclass(frozen=True)
class Tiers:
    """The fractions of all bytes that stay on the device or go to a disk; the rest lives on the host.

    Args:
        weights: weights in the dtype of computation that stay on the device. Others are copied there before each use.
        state: master weights, optimizer state and gradients that stay on the device, and their weights with them. Other
            state is stepped on the host.
        streamed: state that lives on the host and is stepped on the device: it goes there in pieces and comes back.
            Nothing that is on a disk is streamed. Adam and AdamW only.
        disk: master weights and optimizer state on the disk, of the chunks used last.
        disk_weights: weights in the dtype of computation on the disk, of the chunks used last, and their state too.

    Raises `PlanError` outside 0..1, and for more state than there is.
    """

    weights: float = 0.0
    state: float = 0.0
    disk: float = 0.0
    disk_weights: float = 0.0
    streamed: float = 0.0

    def __post_init__(self) -> None:
        for name in ("weights", "state", "disk", "disk_weights", "streamed"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise PlanError(f"{name} is no fraction", got=getattr(self, name), expected="0 to 1")
        disk = max(self.disk, self.disk_weights)
        if self.state + self.streamed + disk > 1.0 + 1e-9:
            raise PlanError(
                "more state than there is",
                got=f"{self.state} on the device, {self.streamed} streamed, {disk} on the disk",
            )


RESIDENCIES = {"device": Tiers(1.0, 1.0), "host": Tiers(), "nvme": Tiers(disk=1.0, disk_weights=1.0)}


def tiers_of(residency: str | Tiers) -> Tiers | None:
    """The fractions a residency stands for; None for "auto". Raises `PlanError` for an unknown one."""
    if isinstance(residency, Tiers):
        return residency
    if residency != "auto" and residency not in RESIDENCIES:
        raise PlanError(
            "unknown residency", got=repr(residency), expected="'auto', 'host', 'device' or Tiers(...)"
        )
    return RESIDENCIES.get(residency)
