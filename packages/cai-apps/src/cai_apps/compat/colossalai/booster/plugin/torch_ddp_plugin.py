"""TorchDDPPlugin, under its own path."""

from cai_apps.booster import TorchDDPPlugin

__all__ = ["TorchDDPPlugin"]
