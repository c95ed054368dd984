"""Tokens that a step has chosen, on their way from the model's device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cai_apps.engine.request import Request
from cai_apps.engine.sampling import Logprobs, TokenLogprob
from cai_apps.engine.step import to_host
from cai_mesh.errors import CheckpointError


class Chosen(NamedTuple):
    """A token that a step has chosen.

    Args:
        request: the request, which has it at the end of its answer.
        token: its id.
        logprob: its log-probability, where the request asks for it.
    """

    request: Request
    token: int
    logprob: TokenLogprob | None = None


class Flight:
    """A token of each of some requests. The copies to the host are under way; `land` waits for them.

    Args:
        requests: those that get the tokens.
        tokens: int64 [R], on the model's device.
        highest: the largest logit of each row, [R], which is no number where one of the row is none.
        logprobs: log-probabilities of rows that ask for them, by row.

    Attributes:
        requests, tokens: as given.
    """

    def __init__(
        self, requests: Sequence[Request], tokens: Tensor, highest: Tensor, logprobs: dict[int, Logprobs]
    ):
        self.requests, self.tokens = requests, tokens
        self._tokens, self._highest = to_host(tokens), to_host(highest)
        self._logprobs = {row: rows.on_host() for row, rows in logprobs.items()}
        self._event = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def land(self) -> list[tuple[Request, int, TokenLogprob | None]]:
        """Return each request's token, and its log-probability where it is asked for.

        Raises:
            CheckpointError: the model predicts what is no number.
        """
        if self._event is not None:
            self._event.synchronize()
        check_numbers(self._highest)
        logprobs = {row: rows.told()[0] for row, rows in self._logprobs.items()}
        return [
            (request, token, logprobs.get(row))
            for row, (request, token) in enumerate(zip(self.requests, self._tokens.tolist(), strict=True))
        ]


def check_numbers(highest: Tensor) -> None:
    """Raise CheckpointError where the largest logits of rows say that a model predicts what is no number."""
    if highest.isnan().any():
        raise CheckpointError(
            "what the model predicts is not finite",
            cause="its weights are damaged, or it was trained too fast",
            fix="take an earlier checkpoint",
        )
