"""Starts the ranks of a run, and lets them agree on what to do."""
