"""Group norm of images, alone or with SiLU: function, reference and kernels.

    y = w (x - mean(x)) / sqrt(var(x) + eps) + b

Mean and variance are over a group of channels and all positions of a sample; SiLU may follow.
"""

from cai_kernels.group_norm.function import group_norm

__all__ = ["group_norm"]
