"""LowLevelZeroPlugin, under its own path."""

from cai_apps.booster import LowLevelZeroPlugin

__all__ = ["LowLevelZeroPlugin"]
