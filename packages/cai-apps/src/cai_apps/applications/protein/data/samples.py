"""Chains as the loop reads them: pieces, their alignments drawn anew each time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cai_apps.applications.protein.data.batch import packed
from cai_apps.applications.protein.data.chains import Known, load
from cai_apps.applications.protein.data.examples import Piece, example, stacked
from cai_apps.applications.protein.data.related import drawn
from cai_apps.applications.protein.loss.whole import Truth
from cai_apps.applications.protein.model.alphafold import Features
from cai_mesh import rng

KEPT = 64
"""Chains that stay in memory once they were read."""


class Pieces:
    """`cai_apps.data.batches.Samples` of chains: what is drawn for a sample depends on the seed and its position.

    Args:
        chains: files of `data.chains`.
        piece: the amount of a chain that a sample holds.
        rounds: the largest number of rounds of a step.
        global_batch: samples of a step, which have as many rounds as each other.
        seed: the seed of all that is drawn.
        fixed: every step has all rounds, as in validation.
    """

    def __init__(
        self,
        chains: Sequence[Path],
        piece: Piece,
        rounds: int,
        global_batch: int,
        seed: int,
        *,
        fixed: bool = False,
    ):
        self._chains, self._piece, self._rounds = list(chains), piece, rounds
        self._global_batch, self._seed, self._fixed = global_batch, seed, fixed
        self._cache: OrderedDict[int, Known] = OrderedDict()

    @property
    def size(self) -> int:
        return len(self._chains)

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        rounds = self._rounds if self._fixed else self.drawn_rounds(int(positions[0]) // self._global_batch)
        samples = []
        for index, position in zip(indices.tolist(), positions.tolist(), strict=True):
            draws = torch.Generator().manual_seed(rng.key(self._seed, "piece", position))
            samples.append(self._sample(self._known(index), rounds, draws))
        rounds_features = [stacked([sample[0][number] for sample in samples]) for number in range(rounds)]
        return packed(rounds_features, stacked([truth for _, truth in samples]))

    def drawn_rounds(self, step: int) -> int:
        """How many rounds a step has: each number from 1 on is as likely (section 1.10)."""
        return 1 + rng.key(self._seed, "rounds", step) % self._rounds

    def _sample(self, record: Known, rounds: int, draws: torch.Generator) -> tuple[list[Features], Truth]:
        most = self._piece.templates
        templates = record.templates[:most] if self._fixed else drawn(record.templates, draws, most)
        return example(record.alignment, record.chain, self._piece, rounds, draws, templates if most else ())

    def _known(self, index: int) -> Known:
        if index in self._cache:
            self._cache.move_to_end(index)
        else:
            self._cache[index] = load(self._chains[index])
            if len(self._cache) > KEPT:
                self._cache.popitem(last=False)
        return self._cache[index]
