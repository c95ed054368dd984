"""Beam search: the likeliest answers among those that the likeliest beginnings lead to.

The rules are those of transformers' `generate(num_beams=...)`: the score of an answer that ends is divided by a power
of its length, the best `width` are kept, and the search ends when no beginning can become better than the worst one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from cai_mesh.errors import ConfigError


@dataclass(frozen=True)
class BeamOptions:
    """How beams are searched.

    Args:
        width: beginnings that are followed side by side.
        max_tokens: the most tokens of an answer.
        length_penalty: the power of an answer's length that its log-probability is divided by; more favours long ones.
        early_stopping: whether the search ends as soon as there are `width` answers.
    """

    width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is out of range", got=getattr(self, name), expected="1 or more")


@dataclass(frozen=True)
class Move:
    """How a beginning goes on.

    Args:
        beam: the number of the beginning.
        token: the id that follows it.
    """

    beam: int
    token: int


class BeamSearch:
    """The beginnings of one prompt's answers, and the answers that have ended.

    Args:
        options: width and length of the search.
        ends: ids at which an answer ends.

    Attributes:
        answers: score and ids of those that have ended, the best first.
        is_done: whether the search has ended.
    """

    def __init__(self, options: BeamOptions, ends: Collection[int]):
        self._options, self._ends = options, ends
        self._scores = [0.0]
        self._beams: list[tuple[int, ...]] = [()]
        self.answers: list[tuple[float, tuple[int, ...]]] = []
        self.is_done = False

    def advance(self, logprobs: torch.Tensor) -> list[Move]:
        """Follow all beginnings by one token; return how those go on that stay, none where the search has ended.

        Args:
            logprobs: [beginnings, V], log-probabilities of the token after each, in the order of the last moves.
        """
        options, length = self._options, len(self._beams[0]) + 1
        scores = (torch.tensor(self._scores, device=logprobs.device)[:, None] + logprobs).flatten()
        count = (
            max(2, 1 + len(self._ends)) * options.width
        )  # so many that beginnings are left if all others end
        values, places = scores.topk(min(count, len(scores)))
        moves = [Move(*divmod(place, logprobs.shape[1])) for place in places.tolist()]
        is_last = length == options.max_tokens
        going_on: list[tuple[float, Move]] = []
        for rank, (score, move) in enumerate(zip(values.tolist(), moves, strict=True)):
            if not is_last and move.token not in self._ends:
                going_on.append((score, move))
            elif rank < options.width:
                self._end(score / length**options.length_penalty, (*self._beams[move.beam], move.token))
        going_on = going_on[: options.width]
        self._beams = [(*self._beams[move.beam], move.token) for _, move in going_on]
        self._scores = [score for score, _ in going_on]
        self.is_done = not going_on or self._is_settled(length)
        return [] if self.is_done else [move for _, move in going_on]

    def _end(self, score: float, ids: tuple[int, ...]) -> None:
        """Keep an answer among the best."""
        if self._options.early_stopping and len(self.answers) == self._options.width:
            return
        self.answers = sorted([*self.answers, (score, ids)], key=lambda answer: -answer[0])[
            : self._options.width
        ]

    def _is_settled(self, length: int) -> bool:
        """Return whether no beginning can become better than the worst answer, if it were to end now."""
        if len(self.answers) < self._options.width:
            return False
        best = self._scores[0] / length**self._options.length_penalty
        return self._options.early_stopping or best <= self.answers[-1][0]
