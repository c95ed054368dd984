"""Tokens to the order of their experts and back: functions, reference and kernels."""

from cai_kernels.token_permute.function import token_permute, token_unpermute

__all__ = ["token_permute", "token_unpermute"]
