"""Adafactor, under its own path."""

from cai_apps.compat.colossalai.nn.optimizer.divided import Adafactor

__all__ = ["Adafactor"]
