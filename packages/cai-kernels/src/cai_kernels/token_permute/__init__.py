"""Tokens to the order of their experts and back: functions, reference and kernels.

    permuted[index[t, k]] = x[t]
    unpermuted[t] = sum over k of weights[t, k] y[index[t, k]]

index orders the choices k of tokens t by their experts.
"""

from cai_kernels.token_permute.function import token_permute, token_unpermute

__all__ = ["token_permute", "token_unpermute"]
