"""Device and host memory as one: residencies for sharded models, and `offload` for one device."""

from cai_gemini.host import HostResidency
from cai_gemini.offload import Tiers, Tuning, offload
from cai_gemini.optimizer import OffloadedOptimizer

__version__ = "0.1.0"

__all__ = ["HostResidency", "OffloadedOptimizer", "Tiers", "Tuning", "offload"]
