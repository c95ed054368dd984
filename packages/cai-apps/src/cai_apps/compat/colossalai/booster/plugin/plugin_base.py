"""Plugin, under its own path."""

from cai_apps.booster import Plugin

__all__ = ["Plugin"]
