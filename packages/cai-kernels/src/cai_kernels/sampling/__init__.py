"""Drawing the next token of a distribution over the vocabulary: function, reference and kernel."""

from cai_kernels.sampling.function import sample

__all__ = ["sample"]
