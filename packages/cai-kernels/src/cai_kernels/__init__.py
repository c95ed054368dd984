"""Training kernels as functions on plain tensors: Triton where it runs, plain torch beside it."""

from cai_kernels.backend import Backend, choose, why_not_triton
from cai_kernels.errors import KernelError
from cai_kernels.rms_norm import rms_norm

__version__ = "0.1.0"

__all__ = ["Backend", "KernelError", "choose", "rms_norm", "why_not_triton"]
