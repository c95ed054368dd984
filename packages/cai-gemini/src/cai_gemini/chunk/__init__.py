"""Keeps one chunk of a model: its weights on device, host and disk, its gradient, and the arithmetic of its step."""
