"""The logger, under its second path."""

from cai_apps.compat.colossalai.logging import DistributedLogger

__all__ = ["DistributedLogger"]
