"""Linear layers in FP8: function, module, conversion of models, emulation and kernels.

    y = (s_x q_x) (s_w q_w)ᵀ + b
    q_x = fp8(x / s_x), s_x = max |x| / (largest number of the type)

A scale covers a tensor, a row or a block; the weight and gradients are cast as x is.
"""

from cai_kernels.fp8_linear.convert import convert_to_fp8
from cai_kernels.fp8_linear.function import Fp8Linear, fp8_linear
from cai_kernels.fp8_linear.products import Fp8Products, InputCache
from cai_kernels.fp8_linear.weight_cache import WeightCache

__all__ = ["Fp8Linear", "Fp8Products", "InputCache", "WeightCache", "convert_to_fp8", "fp8_linear"]
