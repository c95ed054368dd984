"""Notices what goes wrong with a rank, and says which one it was and where."""
