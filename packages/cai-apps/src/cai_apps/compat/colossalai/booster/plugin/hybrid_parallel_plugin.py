"""HybridParallelPlugin, under its own path."""

from cai_apps.booster import HybridParallelPlugin

__all__ = ["HybridParallelPlugin"]
