"""TorchFSDPPlugin, under its own path."""

from cai_apps.booster import TorchFSDPPlugin

__all__ = ["TorchFSDPPlugin"]
