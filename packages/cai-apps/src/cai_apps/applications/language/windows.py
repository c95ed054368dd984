"""Windows of long texts, in which each token is predicted once, and what a model says of them.

A text longer than a model's positions is read in windows of `length` tokens, each `stride` further than the one before,
as in transformers' page on the perplexity of models of fixed length. A window counts what no window before it has
counted, so that all but the first have at least `length - stride` tokens of context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cai_mesh.errors import CheckpointError

POSITIONS_AT_ONCE = 2**26
"""Logits that are in float32 at once."""


@dataclass(frozen=True)
class Window:
    """A part of a text.

    Args:
        ids: the tokens, int64 [n].
        targets: marks of those that are predicted here, bool [n]; the first is none.
        text: the number of the text that it is of.
    """

    ids: np.ndarray
    targets: np.ndarray
    text: int = 0


@dataclass(frozen=True)
class Score:
    """What a model says of the targets of a window or of a text.

    Args:
        log_probability: the sum of their log-probabilities.
        targets: their number.
        correct: the number of those that are the likeliest tokens.
    """

    log_probability: float = 0.0
    targets: int = 0
    correct: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.log_probability + other.log_probability,
            self.targets + other.targets,
            self.correct + other.correct,
        )


def windows_of(
    ids: np.ndarray, targets: np.ndarray | None, length: int, stride: int, text: int = 0
) -> Iterator[Window]:
    """Yield the windows of a text that have targets.

    Args:
        ids: the tokens, int [n].
        targets: marks of those that are to be predicted, bool [n]; None: all but the first.
        length: the most tokens of a window, at least 2.
        stride: the tokens from the beginning of one to that of the next, at least 1 and below `length`.
        text: the number of the text.
    """
    marked = np.ones(len(ids), dtype=bool) if targets is None else targets
    predicted = 1  # nothing comes before the first
    for start in range(0, max(1, len(ids)), stride):
        end = min(start + length, len(ids))
        marks = np.zeros(end - start, dtype=bool)
        marks[predicted - start :] = marked[predicted:end]
        if marks.any():
            yield Window(np.asarray(ids[start:end], dtype=np.int64), marks, text)
        predicted = end
        if end == len(ids):
            return


class Scorer:
    """Computes log-probabilities of tokens by a model.

    Args:
        model: a causal language model of transformers, in evaluation.
        device: its device.
        batch: the number of windows of one forward.
    """

    def __init__(self, model: nn.Module, device: torch.device, batch: int):
        self._model, self._device, self._batch = model, device, batch

    def scores(self, windows: Iterable[Window]) -> Iterator[tuple[Window, Score]]:
        """Yield windows with their scores, in their order.

        Raises:
            CheckpointError: a log-probability is not finite.
        """
        windows = iter(windows)
        while group := list(islice(windows, self._batch)):
            yield from zip(group, self._group(group), strict=True)

    @torch.inference_mode()
    def _group(self, windows: list[Window]) -> list[Score]:
        """Return the scores of windows; shorter ones are filled at their ends, which no token before sees."""
        size = max(len(window.ids) for window in windows) - 1
        inputs = np.zeros((len(windows), max(1, size)), dtype=np.int64)
        for row, window in enumerate(windows):
            inputs[row, : len(window.ids) - 1] = window.ids[:-1]
        output: Any = self._model(input_ids=torch.from_numpy(inputs).to(self._device), use_cache=False)
        return [self._score(output.logits[row], window) for row, window in enumerate(windows)]

    def _score(self, logits: Tensor, window: Window) -> Score:
        places = torch.from_numpy(np.flatnonzero(window.targets)).to(self._device)
        expected = torch.from_numpy(window.ids).to(self._device)[places]
        total, correct = 0.0, 0
        part = max(1, POSITIONS_AT_ONCE // logits.shape[-1])
        for some, targets in zip(places.split(part), expected.split(part), strict=True):
            rows = logits[some - 1].float()
            chosen = rows.gather(1, targets[:, None])[:, 0].double() - rows.double().logsumexp(1)
            total += float(chosen.sum())
            correct += int((rows.argmax(1) == targets).sum())
        if not np.isfinite(total):
            raise CheckpointError(
                "what the model predicts is not finite",
                cause="its weights are damaged, or it was trained too fast",
                fix="evaluate an earlier checkpoint",
            )
        return Score(total, len(places), correct)
