"""GeminiPlugin, under its own path."""

from cai_apps.booster import GeminiPlugin

__all__ = ["GeminiPlugin"]
