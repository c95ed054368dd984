"""HybridAdam, under its own path."""

from cai_apps.compat.colossalai.nn.optimizer.adam import HybridAdam

__all__ = ["HybridAdam"]
