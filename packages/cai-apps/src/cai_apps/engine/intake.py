"""Prompts on their way into an engine: checked, seeded, and given what holds their answers to a form."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cai_apps.engine.engine import Engine
from cai_apps.engine.grammar import Grammars, Matcher
from cai_apps.engine.ranks import Ranks
from cai_apps.engine.request import Request
from cai_apps.engine.sampling import Sampling
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Intake:
    """What adds prompts to an engine, and refuses those that it could not answer.

    Args:
        tokenizer: the model's; None: there is none.
        words: rows of the model's embedding.
        longest: positions that the model has, if there is a limit.
        ends: ids at which an answer ends.
        ranks: ranks that are given the same prompts, and so the same seeds.

    Attributes:
        words, longest: as given.
        grammars: the maker of matchers; may be used by another thread than the one that adds prompts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast | None,
        words: int,
        longest: int | None,
        ends: Sequence[int],
        ranks: Ranks,
    ):
        self._tokenizer, self._ranks = tokenizer, ranks
        self.words, self.longest = words, longest
        self.grammars = Grammars(tokenizer, words, ends)

    def add(
        self, engine: Engine, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> list[Request]:
        """Add all prompts to an engine, or none of them; return their requests.

        Raises:
            ConfigError: a prompt is empty or too long, has ids that the model does not know, or a form is refused.
        """
        for prompt, sampling in zip(prompts, samplings, strict=True):
            self.check(prompt, sampling)
        drawn = self._ranks.first([random.getrandbits(62) for _ in prompts])
        requests: list[Request] = []
        try:
            for prompt, sampling, seed in zip(prompts, samplings, drawn, strict=True):
                requests.append(engine.add(prompt, sampling, seed=_seed(sampling, seed)))
                requests[-1].matcher = self.grammars.matcher(sampling)
        except ConfigError:
            for request in requests:
                engine.cancel(request.number)
            raise
        return requests

    def add_one(
        self, engine: Engine, prompt: Sequence[int], sampling: Sampling, matcher: Matcher | None
    ) -> Request:
        """Add a prompt whose matcher is made already; errors are those of `add`."""
        self.check(prompt, sampling)
        request = engine.add(prompt, sampling, seed=_seed(sampling, random.getrandbits(62)))
        request.matcher = matcher
        return request

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise ConfigError for a prompt that the model could not answer."""
        if self.longest is not None and len(prompt) + sampling.max_tokens > self.longest:
            raise ConfigError(
                "the prompt and its answer are longer than the model's positions",
                got=f"{len(prompt)} + {sampling.max_tokens} tokens",
                expected=f"at most {self.longest} (max_position_embeddings)",
                fix="shorten the prompt, or lower max_tokens",
            )
        ids = {
            "the prompt": prompt,
            "logit_bias": sampling.logit_bias,
            "stop_token_ids": sampling.stop_token_ids,
        }
        for name, tokens in ids.items():
            wrong = [token for token in tokens if not 0 <= token < self.words]
            if wrong:
                raise ConfigError(
                    f"{name} has ids that the model does not know",
                    got=wrong[0],
                    expected=f"0 to {self.words - 1}",
                    cause="the tokenizer is another model's" if name == "the prompt" else "",
                )
        if sampling.stop and self._tokenizer is None:
            raise ConfigError(
                "a text ends the answer, and there is no tokenizer",
                fix="give LLM a tokenizer, or use ids alone",
            )


def _seed(sampling: Sampling, drawn: int) -> int:
    return drawn if sampling.seed is None else sampling.seed
