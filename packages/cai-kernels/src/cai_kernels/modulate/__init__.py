"""Layer norm scaled and shifted by sample, and a gated sum: functions, references and kernels.

    modulate(x) = (1 + scale) (x - mean(x)) / sqrt(var(x) + eps) + shift
    gate_add(r, x) = r + gate x

Scale, shift and gate are of a sample, mean and variance over the last dim.
"""

from cai_kernels.modulate.function import gate_add, modulate

__all__ = ["gate_add", "modulate"]
