"""Linear layers whose input has few rows, as in decoding: functions, reference and kernels.

    y[i] = hidden @ weights[i].T + biases[i]

The time is that of reading the weights, each of which is read once and where it is.
"""

from cai_kernels.skinny_linear.function import skinny_linears, skinny_pays

__all__ = ["skinny_linears", "skinny_pays"]
