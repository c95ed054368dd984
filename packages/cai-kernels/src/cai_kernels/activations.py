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
    """The share of a normal distribution below x, to 1e-7, from bell = exp(-x² / 2), which its slope needs too.

    Abramowitz and Stegun, 7.1.26.
    """
    root = tl.rsqrt(
        1.0 + 0.23164189 * tl.abs(x)
    )  # its square is the reciprocal in a quarter of a division's time
    t = root * root
    series = (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592
    beyond = 0.5 * series * t * bell
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
