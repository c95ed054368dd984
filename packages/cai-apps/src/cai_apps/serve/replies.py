"""Answers as clients read them: texts, calls and log-probabilities of the tokens that come from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cai_apps.engine.sampling import TokenLogprob
from cai_apps.engine.text import AnswerText
from cai_apps.serve.errors import ApiError
from cai_apps.serve.model import ServedModel
from cai_apps.serve.prompts import Job
from cai_apps.serve.replica import Going, Replica, Token
from cai_apps.serve.tools import VISIBLE, Call, CallReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass
class Part:
    """What is new of an answer.

    Args:
        index: the number of the answer, over all prompts.
        text: text that people may read.
        calls: calls of tools that are complete.
        logprobs: log-probabilities of the new tokens, if asked for.
        tokens: number of the new tokens.
        ending: the reason if the answer has ended, in OpenAI's words.
    """

    index: int
    text: str
    calls: Sequence[Call] = ()
    logprobs: Sequence[TokenLogprob] = ()
    tokens: int = 0
    ending: str | None = None


class _Answer:
    """One answer while it is written."""

    def __init__(self, job: Job, prompt: Sequence[int], tokenizer: PreTrainedTokenizerFast, index: int):
        visible = _visible(tokenizer) if job.tools else None
        self._writer = AnswerText(tokenizer, prompt, job.stop, visible=visible)
        self._reader = None if job.tools is None else CallReader(job.tools)
        self._index, self.has_ended, self.is_stopped = index, False, False

    def add(self, tokens: Sequence[Token]) -> Part:
        """Add tokens; return what is new. After a text that stops the answer there is nothing new."""
        ending: str | None = None
        read: list[Token] = []
        for token in tokens:
            read.append(token)
            self._writer.add(token.token)
            ending = token.ending
            if self._writer.is_stopped:
                ending, self.is_stopped = "stop", token.ending is None
                break
        if ending is not None:
            self._writer.finish()
            self.has_ended = True
        if ending == "failed":
            raise ApiError(422, "the form of the answer is too large to be held to", code="form_too_large")
        text, calls = self._writer.pass_on(ends=self.has_ended), []
        if self._reader is not None:
            text, calls = self._reader.add(text, ends=self.has_ended)
            if self._reader.calls and ending == "stop":
                ending = "tool_calls"
        logprobs = [token.logprob for token in read if token.logprob is not None]
        return Part(self._index, text, calls, logprobs, len(read), ending)


class Reply:
    """The answers to a request.

    Args:
        job: the request.
        model: the model that is asked.

    Attributes:
        prompt_logprobs: log-probabilities of each prompt's tokens but the first, if asked for, once its answer begins.
        prompt_tokens, answer_tokens: tokens so far.
        first_token_seconds: seconds until the first token.
    """

    def __init__(self, job: Job, model: ServedModel):
        self._job, self._model = job, model
        self._asked: list[tuple[Replica, Going]] = []
        self.prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        self.prompt_tokens = sum(map(len, job.prompts))
        self.answer_tokens = 0

    async def parts(self) -> AsyncIterator[list[Part]]:
        """Ask the engine, and yield what is new of all answers whenever something is; whoever leaves ends the rest.

        Raises:
            ApiError: too much waits already, the engine refuses a prompt or is dead, or an answer cannot have its form.
        """
        news = asyncio.Event()
        self._model.admit(self._job.answers)
        try:
            for prompt in self._job.prompts:
                self._asked.append(self._model.ask(prompt, self._job.sampling, news))
            answers = self._answers()
            while not all(answer.has_ended for answer in answers):
                await news.wait()
                news.clear()
                parts = [part for number in range(len(self._asked)) for part in self._news(number, answers)]
                if parts:
                    yield parts
        finally:
            for replica, going in self._asked:
                replica.close(going)
            self._model.leave(self._job.answers)

    def _answers(self) -> list[_Answer]:
        count = self._job.sampling.n
        return [
            _Answer(self._job, prompt, self._model.tokenizer, number * count + index)
            for number, prompt in enumerate(self._job.prompts)
            for index in range(count)
        ]

    def _news(self, number: int, answers: Sequence[_Answer]) -> list[Part]:
        """Return what is new of the answers to one prompt."""
        replica, going = self._asked[number]
        by_answer: dict[int, list[Token]] = {}
        for token in going.take():
            by_answer.setdefault(token.answer, []).append(token)
        if going.prompt_logprobs:
            self.prompt_logprobs[number] = going.prompt_logprobs
        parts = []
        for index, tokens in by_answer.items():
            answer = answers[number * self._job.sampling.n + index]
            if answer.has_ended:  # by a text that the engine knows nothing of
                continue
            parts.append(answer.add(tokens))
            if answer.is_stopped:
                replica.end(going, index)
        self.answer_tokens += sum(part.tokens for part in parts)
        return parts

    @property
    def times(self) -> list[float]:
        """Seconds from each prompt to its first token, of those that have one."""
        return [going.first - going.since for _, going in self._asked if going.first is not None]


def _visible(tokenizer: PreTrainedTokenizerFast) -> Mapping[int, str]:
    """Return control tokens that begin or end calls, by id."""
    return {
        number: token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content in VISIBLE
    }
