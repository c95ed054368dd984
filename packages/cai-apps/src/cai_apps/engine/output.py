"""What an engine returns: answers to prompts, whole or token by token."""

from __future__ import annotations

from dataclasses import dataclass

from cai_apps.engine.request import Ending
from cai_apps.engine.sampling import TokenLogprob


@dataclass(frozen=True)
class Answer:
    """What was written after a prompt.

    Args:
        token_ids: its ids, that of its end among them.
        text: its text, without a text that stopped it; empty without a tokenizer.
        ending: "stop" at an end that the model chose or a text of `stop`; "length" at `max_tokens`.
        logprobs: a number for each token, if `Sampling.logprobs` asks for it.
    """

    token_ids: tuple[int, ...]
    text: str
    ending: Ending
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Output:
    """A prompt and the answers to it.

    Args:
        prompt_token_ids: the ids of the prompt.
        answers: `Sampling.n` answers.
        prompt_logprobs: a number for each id of the prompt but the first, if asked for.
    """

    prompt_token_ids: tuple[int, ...]
    answers: tuple[Answer, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.answers[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the first answer."""
        return self.answers[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the first answer."""
        return self.answers[0].logprobs


@dataclass(frozen=True)
class Piece:
    """A token of an answer while it is written.

    Args:
        prompt: the number of the prompt among those that were asked.
        answer: the number of the answer to it.
        token_id: the token.
        text: text that is certain with it; may be of tokens before, or empty.
        ending: the reason if the answer ended with it; None: it goes on.
        logprob: the token's, if `Sampling.logprobs` asks for it.
    """

    prompt: int
    answer: int
    token_id: int
    text: str
    ending: Ending | None = None
    logprob: TokenLogprob | None = None
