"""Gated activations, swiglu, geglu and sigmoid gates: functions, references and kernels."""

from cai_kernels.gated.function import geglu, sigmoid_gate, swiglu

__all__ = ["geglu", "sigmoid_gate", "swiglu"]
