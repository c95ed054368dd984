"""What kernels of several ops share in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """e^x in float32 in two instructions; `tl.exp` takes five, to keep results below 2^-126, which are 0 here."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def again(value):
    """In float32; of bfloat16 by its bits, lest the compiler keeps an earlier widened copy in twice the registers."""
    if value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def next_may_launch(LAPPED: tl.constexpr):
    """A kernel launched by `launch.lapped` may take the place of this one's programs as they end."""
    if LAPPED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(LAPPED: tl.constexpr):
    """Until the kernel before this one is done; first of all in a kernel launched by `launch.lapped`."""
    if LAPPED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b in float32, multiplied as `launch.dot_precision` says."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)
