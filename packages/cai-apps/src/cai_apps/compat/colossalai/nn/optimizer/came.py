"""CAME, under its own path."""

from cai_apps.compat.colossalai.nn.optimizer.divided import CAME

__all__ = ["CAME"]
