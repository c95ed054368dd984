"""Linear layers whose weights are stored in 4 or 8 bits and do not train: functions, module, conversion of models.

    y = x Wᵀ + b
    W[o, i] = level[code[o, i]] scale[o, i // 64]     nf4
    W[o, i] = code[o, i] scale[o]                     int8

nf4 is the type of QLoRA (Dettmers et al., arXiv:2305.14314): 16 levels, which are quantiles of the normal distribution
between -1 and 1; the scale of 64 numbers along the inputs is the largest magnitude among them, in float32. int8 is
symmetric: the scale of a row is its largest magnitude over 127. W is the product in float32, rounded once to the dtype
of x.
"""

from cai_kernels.quantized_linear.convert import convert_to_quantized
from cai_kernels.quantized_linear.function import dequantize, quantize, quantized_linear
from cai_kernels.quantized_linear.kinds import QuantizedKind, check_features, kind_fits
from cai_kernels.quantized_linear.layer import QuantizedLinear

__all__ = [
    "QuantizedKind",
    "QuantizedLinear",
    "check_features",
    "convert_to_quantized",
    "dequantize",
    "kind_fits",
    "quantize",
    "quantized_linear",
]
