"""Floating-point operations of training a causal language model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from cai_apps.compose.blocks import blocks_of
from cai_mesh.experts import visited_share

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TRAINED, FROZEN, FORWARD_ONLY = 6, 4, 2
"""FLOPs of a token and a weight: forward, the gradient of the input and that of the weight; without the last; and
without both."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of forward and backward, without recompute, in both usual conventions.

    Args:
        weights: FLOPs of a token in products with weights.
        width: all heads together, in elements; 0 where there are none.
        windows: the layers with attention, by the tokens that one sees at most; None: all before it.
    """

    weights: float
    width: int
    windows: Mapping[int | None, int]

    def causal(self, lengths: np.ndarray) -> float:
        """Return the FLOPs of documents: attention counts the positions a token may see, half the square at most."""
        return self._of(lengths, {window: _seen(lengths, window) for window in self.windows})

    def full(self, lengths: np.ndarray) -> float:
        """Return the FLOPs of documents: attention counts whole squares, as "PaLM" (2022, appendix B) does."""
        return self._of(lengths, dict.fromkeys(self.windows, float((lengths.astype(np.float64) ** 2).sum())))

    def _of(self, lengths: np.ndarray, pairs: Mapping[int | None, float]) -> float:
        attention = sum(12 * layers * self.width * pairs[window] for window, layers in self.windows.items())
        return self.weights * float(lengths.sum()) + attention


def _seen(lengths: np.ndarray, window: int | None) -> float:
    """Return how many pairs of a token and one that it sees documents have, a diagonal counted by half."""
    wide = lengths.astype(np.float64)
    unseen = 0.0 if window is None else np.maximum(wide - window, 0.0) ** 2
    return float((wide**2 - unseen).sum()) / 2


def model_flops(model: PreTrainedModel, config: PretrainedConfig) -> ModelFlops:
    """6 FLOPs per token and weight, 4 where it is frozen, 12 * width * pairs for the attention of a layer.

    A frozen weight that lies in front of the first module of the model with a trained one has no backward: 2.

    `model` is the whole model, its parameters may be on the meta device. An input embedding that is not also
    the output head is a lookup and counts nothing. Of experts those count that a token visits. A config without
    attention heads (a state space model) counts its weights alone.
    """
    embedding = _table(model)
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding and embedding is not None
    leading = _before_trained(model)
    matrices = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or (parameter is embedding and not tied) or _is_position_table(name):
            continue
        cost = TRAINED if parameter.requires_grad else FROZEN
        if name.startswith(leading) and parameter is not embedding:
            cost = FORWARD_ONLY
        matrices += cost * parameter.numel() * visited_share(config, name, parameter)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return ModelFlops(matrices, 0, {})
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return ModelFlops(matrices, width, _windows(config))


def _table(model: PreTrainedModel) -> Tensor | None:
    """Return the weight of the input embedding; None: it is a layer of another kind, as of pictures."""
    layer = model.get_input_embeddings()
    return layer.weight if isinstance(layer, nn.Embedding) else None


def _before_trained(model: PreTrainedModel) -> tuple[str, ...]:
    """Return how the names begin of the blocks in front of everything that is trained: no gradient comes to them."""
    embedding = _table(model)
    if embedding is None or embedding.requires_grad:
        return ()
    inner = {id(block) for block in blocks_of(model)}
    names = [name for name, parameter in model.named_parameters()]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    passed = names[: names.index(trained[0])] if trained else names
    rest = set(names) - set(passed)
    prefixes = [f"{name}." for name, module in model.named_modules() if id(module) in inner]
    return tuple(prefix for prefix in prefixes if not any(name.startswith(prefix) for name in rest))


def _windows(config: PretrainedConfig) -> dict[int | None, int]:
    """Return the layers with attention by the tokens that one sees at most; None: all before it.

    Layers of another kind, such as those of a state space or of linear attention, are left out.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        sliding = isinstance(window, int) and getattr(config, "use_sliding_window", None) is not False
        return {window if sliding else None: config.num_hidden_layers}
    attentive = [kind for kind in kinds if kind.endswith("attention") and not kind.startswith("linear")]
    return dict(Counter(window if kind.startswith("sliding") else None for kind in attentive))


def _is_position_table(name: str) -> bool:
    return name.endswith(("wpe.weight", "embed_positions.weight", "position_embeddings.weight"))
