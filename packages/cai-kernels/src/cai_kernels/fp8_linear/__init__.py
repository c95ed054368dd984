"""Linear layers in FP8: function, module, emulation and kernels."""

from cai_kernels.fp8_linear.function import Fp8Linear, WeightCache, fp8_linear

__all__ = ["Fp8Linear", "WeightCache", "fp8_linear"]
