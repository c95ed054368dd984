"""Activations in Triton: value and slope in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    """(sigmoid(x), its slope), without the cancellation of 1 - sigmoid(x) and without overflow."""
    e = tl.exp(-tl.abs(x))
    r = 1.0 / (1.0 + e)
    return tl.where(x >= 0, r, e * r), e * r * r


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
        s = 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
        return x * s, s + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
