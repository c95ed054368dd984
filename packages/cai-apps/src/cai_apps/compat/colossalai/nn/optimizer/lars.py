"""Lars, under its own path."""

from cai_apps.compat.colossalai.nn.optimizer.divided import Lars

__all__ = ["Lars"]
