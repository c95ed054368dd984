"""Gated activations, swiglu, geglu and sigmoid gates: functions, references and kernels.

    y = a(gate) up

The activation a is SiLU, GELU or the sigmoid.
"""

from cai_kernels.gated.function import geglu, sigmoid_gate, swiglu

__all__ = ["geglu", "sigmoid_gate", "swiglu"]
