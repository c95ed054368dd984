"""What kernels of several ops share in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b in float32, multiplied as `launch.dot_precision` says."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)
