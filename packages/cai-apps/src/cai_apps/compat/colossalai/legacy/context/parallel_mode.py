"""Kinds of groups of ranks, under their second path."""

from cai_apps.compat.colossalai.legacy.context import ParallelMode

__all__ = ["ParallelMode"]
