"""Feature counts of the layers that can be cut as linear ones."""

from __future__ import annotations

from torch import nn

from cai_mesh.adapters import base_layer
from cai_mesh.gradients import TRANSPOSED, own_products


def features(layer: nn.Module) -> tuple[int, int] | None:
    """Input and output features of what can be cut as a linear layer; None of anything else.

    Those of a layer with adapters are those of the layer itself.
    """
    layer = base_layer(layer)
    products, weight = own_products(layer), layer._parameters.get("weight")
    if products is None or weight is None:
        return None
    out, inside = weight.shape
    return (out, inside) if products is TRANSPOSED else (inside, out)
