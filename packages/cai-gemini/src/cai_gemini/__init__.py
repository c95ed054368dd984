"""Device and host memory as one: residencies for sharded models, and `offload` for one device."""

from cai_gemini.host import HostResidency
from cai_gemini.offload import offload

__version__ = "0.1.0"

__all__ = ["HostResidency", "offload"]
