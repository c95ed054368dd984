"""Group norm of images, alone or with SiLU: function, reference and kernels."""

from cai_kernels.group_norm.function import group_norm

__all__ = ["group_norm"]
