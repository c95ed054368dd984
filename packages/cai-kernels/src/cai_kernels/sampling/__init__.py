"""Drawing the next token of a distribution over the vocabulary: function, reference and kernel.

    token = argmax(x / temperature + noise)
    noise = -log(-log(uniform))

x are the logits that pass every filter: so a token comes with its probability.
"""

from cai_kernels.sampling.function import sample

__all__ = ["sample"]
