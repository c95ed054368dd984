"""Linear layers whose input has few rows, as in decoding: functions, reference and kernels.

y[i] = x @ weights[i].T + biases[i]
"""

from cai_kernels.skinny_linear.function import skinny_linears, skinny_pays

__all__ = ["skinny_linears", "skinny_pays"]
