"""AMP_TYPE, under its path of the first generation."""

from cai_apps.compat.colossalai.legacy.amp import AMP_TYPE

__all__ = ["AMP_TYPE"]
