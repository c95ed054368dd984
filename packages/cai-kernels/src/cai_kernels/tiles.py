"""Triton functions that kernels of several operators share."""

from __future__ import annotations

from cai_kernels.compiler import tl, triton


@triton.jit
def exp(x):
    """e^x in float32 in two instructions. `tl.exp` takes five, for results below 2^-126, which are 0 here."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def to_float32(value):
    """Cast to float32; bfloat16 by its bits, so that the compiler does not keep an earlier cast in registers."""
    if value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Allow the next kernel, launched with `launch.pdl_options`, to start as programs of this one end."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the previous kernel; comes first in a kernel launched with `launch.pdl_options`."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b in float32, with the precision of `launch.dot_precision`."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)
