"""FusedAdam, under its own path."""

from cai_apps.compat.colossalai.nn.optimizer.adam import FusedAdam

__all__ = ["FusedAdam"]
