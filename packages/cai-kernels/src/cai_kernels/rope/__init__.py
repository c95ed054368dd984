"""Rotary position embedding: function, reference and kernel.

    a' = a cos - b sin
    b' = b cos + a sin

(a, b) is a pair of values of a head, the angle that of its place in the head times the position.
"""

from cai_kernels.rope.function import rope

__all__ = ["rope"]
