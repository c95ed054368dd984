"""A model as lm-evaluation-harness drives one: its published interface, `lm_eval.api.model.TemplateLM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from cai_apps.applications.language.evaluate import Evaluation, Evaluator
from cai_apps.applications.language.generate import Place, Writer
from cai_apps.applications.language.windows import Window
from cai_apps.engine import EngineOptions, Sampling

NEW_TOKENS = 256
"""Tokens of an answer where a task says nothing of its length."""


class HarnessModel(TemplateLM):
    """A model behind the interface of lm-evaluation-harness, whose base class divides texts into context and answer.

    Args:
        place: the directories of the model.
        batch: the number of requests of one forward.
        length: the most tokens that the model is given; None: its positions, at most `evaluate.LONGEST`.
    """

    backend = "causal"

    def __init__(self, place: Place, batch: int, length: int | None):
        super().__init__()
        self._place, self._batch = place, batch
        self._evaluator = Evaluator(place, Evaluation(length=length, batch=batch))
        self._writer: Writer | None = None

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text, and stands before one whose tokenizer puts nothing there."""
        return int(self._evaluator.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context: that of a beginning, or else `eot_token_id`."""
        bos = self._evaluator.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """The most tokens that the model is given."""
        return self._evaluator.length

    @property
    def tokenizer_name(self) -> str:
        """The directory of the tokenizer, which names caches of requests."""
        return str(self._place.tokenizer).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the tokenizer's template writes it."""
        text: Any = self._evaluator.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Return the ids of a text, with what the tokenizer puts around it unless that is refused."""
        return self._evaluator.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """Return sums of log-probabilities, and whether each token is the likeliest, of (_, context, continuation)."""

        def window(context: list[int], continuation: list[int]) -> Window:
            ids = np.array([*context, *continuation][-(self.max_length + 1) :], dtype=np.int64)
            targets = np.zeros(len(ids), dtype=bool)
            targets[-len(continuation) :] = True
            targets[0] = False
            return Window(ids, targets)

        windows = [window(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(windows)), key=lambda number: -len(windows[number].ids))
        scored_windows = self._evaluator.scorer.scores(windows[number] for number in order)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(windows)
        for number, (_, score) in zip(order, scored_windows, strict=True):
            answers[number] = score.log_probability, score.correct == score.targets
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in the windows that the harness publishes."""
        sums = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            sums.append(sum(score for score, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each context, up to one of the texts that end an answer."""
        if self._writer is None:
            options = EngineOptions(requests=self._batch)
            self._writer = Writer(self._place, self._evaluator.tokenizer, options)
        prompts, samplings = [], []
        for context, options in (request.args for request in requests):
            until = options.get("until") or []
            size = int(options.get("max_gen_toks", NEW_TOKENS))
            temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
            stop = (until,) if isinstance(until, str) else tuple(until)
            prompts.append(self.tok_encode(context)[-(self.max_length - size) :])
            samplings.append(Sampling(max_tokens=size, temperature=temperature, stop=stop, seed=0))
        answers = self._writer.answers(prompts, samplings)
        return [answer.text for answer in answers]
