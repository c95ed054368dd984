"""Layer norm scaled and shifted by sample, and a gated sum: functions, references and kernels."""

from cai_kernels.modulate.function import gate_add, modulate

__all__ = ["gate_add", "modulate"]
