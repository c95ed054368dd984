"""Activations in Triton: value and derivative in float32."""

from __future__ import annotations

from cai_kernels.compiler import tl, triton
from cai_kernels.tiles import exp

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sigmoid(x, ROUNDED: tl.constexpr):
    """1 / (1 + 2^-x), and the slope of that over x / log2(e).

    To float32, without the cancellation of 1 - sigmoid and without overflow; or, for a value that is ROUNDED to 16 bits
    before anybody sees it, with a squared reciprocal root for a division and 6e-8 off: GELU's backward then is bound by
    memory (100 % of a copy's bandwidth in place of 91 % on an H200, Triton 3.6).
    """
    if ROUNDED:
        root = tl.rsqrt(1.0 + tl.exp2(-x))
        s = root * root
        return s, s * (1.0 - s)
    else:
        e = tl.exp2(-tl.abs(x))
        r = 1.0 / (1.0 + e)
        return tl.where(x >= 0, r, e * r), e * r * r


@triton.jit
def _normal(x, bell):
    """The share of a normal distribution below x, from bell = exp(-x² / 2), which its slope needs too.

    The form of Abramowitz and Stegun, 7.1.26, with a term more: 1e-8 off where theirs is 8e-8, which float32 shows. Its
    half is in the coefficients, so it takes no more instructions.
    """
    root = tl.rsqrt(1.0 + 0.39 * tl.abs(x))  # its square is the reciprocal in a quarter of a division's time
    t = root * root
    series = ((0.05384619206 * t - 0.2582405583) * t + 0.3751635447) * t - 0.0166318241
    series = (series * t + 0.1944354075) * t + 0.1514272478
    beyond = series * t * bell
    return tl.where(x >= 0, 1.0 - beyond, beyond)


@triton.jit
def activation(x, KIND: tl.constexpr, ROUNDED: tl.constexpr = False):
    """(a(x), a'(x)) of x in float32. KIND: "silu", "gelu" (erf), "gelu_tanh" or "sigmoid".

    ROUNDED: both count to a 16-bit rounding of their largest only. GELU: Hendrycks and Gimpel, arXiv:1606.08415. Its
    tanh form is x * sigmoid(2z), as tanh(z) = 2 sigmoid(2z) - 1, with 2z = 1.595769 (x + 0.044715 x^3).
    """
    if KIND == "silu":
        s, slope = _sigmoid(x * LOG2E, ROUNDED)
        return x * s, s + x * slope
    elif KIND == "sigmoid":
        return _sigmoid(x * LOG2E, False)
    elif KIND == "gelu_tanh":
        square = x * x
        s, slope = _sigmoid(x * (2.302208198144325 + 0.1029432395800235 * square), ROUNDED)
        return x * s, s + x * slope * (1.5957691216057308 + 0.21406444881780073 * square)
    else:
        bell = exp(-0.5 * x * x)
        s = _normal(x, bell)
        return x * s, s + x * 0.3989422804014327 * bell
