"""Linear layers in FP8: function, module, conversion of models, emulation and kernels."""

from cai_kernels.fp8_linear.convert import convert_to_fp8
from cai_kernels.fp8_linear.function import Fp8Linear, WeightCache, fp8_linear

__all__ = ["Fp8Linear", "WeightCache", "convert_to_fp8", "fp8_linear"]
