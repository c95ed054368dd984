"""global_context, under its path of the first generation."""

from cai_apps.compat.colossalai.legacy.core import global_context

__all__ = ["global_context"]
