"""Lamb, under its own path."""

from cai_apps.compat.colossalai.nn.optimizer.divided import Lamb

__all__ = ["Lamb"]
