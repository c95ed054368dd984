"""Noise on the embeddings in training (Jain et al., "NEFTune", arXiv:2310.05914).

What an embedding returns gets alpha / sqrt(L d) times a number between -1 and 1 in each of its d features. L is the
length of the document in which the token stands, or of the row where that is one text. The paper's own code counts the
tokens of each example without padding, so that an example's noise does not depend on its batch; a packed row is one.

A number depends on the seed, on the row's place in the run's order and on its own place in the row: not on ranks, nor
on microbatches. The embedding is no part of a block, so that recompute does not draw again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cai_apps.data.batches import Samples
from cai_mesh import rng
from cai_mesh.errors import ConfigError, PlanError

KEYS = "noise_keys"
"""The argument of a model with noise, and its name in a batch: a key for each row, int64 [B]."""
ELEMENTS = 1 << 22
"""Numbers that are drawn at a time."""


@dataclass(frozen=True)
class NoisySamples:
    """Samples with the keys of their noise.

    Args:
        plain: the samples without.
        seed: the seed of the run.
    """

    plain: Samples
    seed: int

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.plain.size

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        """Return samples by number, with a key of each one's place in the run's order, int64 [n]."""
        keys = [rng.key(self.seed, "neftune", place) for place in positions.tolist()]
        return self.plain.rows(indices, positions) | {KEYS: torch.tensor(keys)}


class EmbeddingNoise:
    """The noise of a model's embeddings, by hooks: of the model for its arguments, of the embedding for its result.

    Args:
        alpha: the magnitude, before it is divided by the root of the number of features of a text.
    """

    def __init__(self, alpha: float):
        self._alpha = alpha
        self._keys: Tensor | None = None
        self._starts: Tensor | None = None

    def attach(self, model: nn.Module, embedding: nn.Module) -> None:
        """Let the embedding of a model have noise in training, where the model is given `KEYS`."""
        model.register_forward_pre_hook(self._take, with_kwargs=True)
        embedding.register_forward_hook(self._add)
        model.register_forward_hook(self._forget, always_call=True)

    def _take(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._keys, self._starts = kwargs.get(KEYS), kwargs.get("cu_seqlens")
        return args, {name: value for name, value in kwargs.items() if name != KEYS}

    def _forget(self, *_: Any) -> None:
        self._keys = self._starts = None

    def _add(self, embedding: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        if not embedding.training or self._keys is None:
            return None
        if output.dim() != 3 or output.shape[0] != self._keys.shape[0]:
            raise PlanError(
                "the embedding of this model gives no rows of tokens, which noise is for",
                got=f"{type(embedding).__name__} gives {tuple(output.shape)} for {self._keys.shape[0]} rows",
                expected="[rows, tokens, features]",
                fix="set model.neftune_alpha to 0",
            )
        return output + noise(self._alpha, self._keys, self._starts, output)


@torch.no_grad()
def noise(alpha: float, keys: Tensor, starts: Tensor | None, like: Tensor) -> Tensor:
    """Return the noise of rows of embeddings [B, S, d], in their dtype and on their device.

    Args:
        alpha: the magnitude.
        keys: a key for each row, int64 [B].
        starts: the first place of each document of a row, padded with S, int32 [B, D + 1]; None: a row is one.
        like: the embeddings.
    """
    rows, length, features = like.shape
    magnitude = alpha * (lengths_at(starts, rows, length, like.device) * features).rsqrt()
    drawn, columns = torch.empty_like(like), torch.arange(features, device=like.device)
    step = max(1, ELEMENTS // (rows * features))
    for first in range(0, length, step):
        places = torch.arange(first, min(first + step, length), device=like.device)
        index = places[:, None] * features + columns
        unit = rng.unit(keys[:, None, None], index)
        drawn[:, first : first + step] = (2 * unit - 1) * magnitude[:, first : first + step, None]
    return drawn


def lengths_at(starts: Tensor | None, rows: int, length: int, device: torch.device) -> Tensor:
    """Return the length of the document in which each place lies, float64 [rows, length]."""
    if starts is None:
        return torch.full((rows, length), float(length), dtype=torch.float64, device=device)
    places = torch.arange(length, dtype=starts.dtype, device=device).expand(rows, length).contiguous()
    end = torch.searchsorted(starts.contiguous(), places, right=True)
    return (starts.gather(1, end) - starts.gather(1, end - 1)).double()


def embedding_of(model: nn.Module, name: str) -> nn.Embedding:
    """Return the embedding of a model of transformers. Raises ConfigError where it has none that could have noise."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, RuntimeError):  # transformers raises one where a class does not say
        embedding = None
    if not isinstance(embedding, nn.Embedding):
        raise ConfigError(
            f"{name} has no table of embeddings that could have noise",
            got="none" if embedding is None else type(embedding).__name__,
            expected="an Embedding that get_input_embeddings() returns",
            fix="set model.neftune_alpha to 0",
        )
    return embedding
