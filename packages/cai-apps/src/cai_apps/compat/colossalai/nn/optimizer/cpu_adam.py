"""CPUAdam, under its own path."""

from cai_apps.compat.colossalai.nn.optimizer.adam import CPUAdam

__all__ = ["CPUAdam"]
