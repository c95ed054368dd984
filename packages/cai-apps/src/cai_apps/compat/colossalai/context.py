"""ParallelMode, under its path of the first generation."""

from cai_apps.compat.colossalai.legacy.context import ParallelMode

__all__ = ["ParallelMode"]
