"""Keeps the files of a run: its directory, checkpoints, and what of its config has changed."""
