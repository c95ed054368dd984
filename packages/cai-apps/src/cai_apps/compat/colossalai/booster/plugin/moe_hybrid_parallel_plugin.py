"""MoeHybridParallelPlugin, under its own path."""

from cai_apps.booster import MoeHybridParallelPlugin

__all__ = ["MoeHybridParallelPlugin"]
