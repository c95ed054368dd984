"""Booster, under its second path."""

from cai_apps.booster import Booster

__all__ = ["Booster"]
