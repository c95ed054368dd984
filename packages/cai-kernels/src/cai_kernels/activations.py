"""Activations in Triton: value and slope in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from cai_kernels.tiles import exp


@triton.jit
def _sigmoid(x):
    """(sigmoid(x), its slope), without the cancellation of 1 - sigmoid(x) and without overflow."""
    e = exp(-tl.abs(x))
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
def activation(x, KIND: tl.constexpr):
    """(a(x), a'(x)) of x in float32. KIND: "silu", "gelu" (erf), "gelu_tanh" or "sigmoid".

    GELU: Hendrycks and Gimpel, arXiv:1606.08415. Its tanh form is x * sigmoid(2z), as tanh(z) = 2 sigmoid(2z) - 1.
    """
    if KIND == "silu":
        s, slope = _sigmoid(x)
        return x * s, s + x * slope
    elif KIND == "sigmoid":
        return _sigmoid(x)
    elif KIND == "gelu_tanh":
        s, slope = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return x * s, s + x * slope * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        bell = exp(-0.5 * x * x)
        s = _normal(x, bell)
        return x * s, s + x * 0.3989422804014327 * bell
