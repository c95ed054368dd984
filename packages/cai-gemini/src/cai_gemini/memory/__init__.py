"""Holds device and host memory, and moves bytes between them in the background."""
