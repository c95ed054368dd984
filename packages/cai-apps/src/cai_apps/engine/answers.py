"""Answers while they are written: what each step adds to them, their texts, and their ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cai_apps.engine.engine import Engine
from cai_apps.engine.grammar import Matcher
from cai_apps.engine.intake import Intake
from cai_apps.engine.output import Answer, Output, Piece
from cai_apps.engine.request import Request
from cai_apps.engine.sampling import Sampling
from cai_apps.engine.text import AnswerText
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Answers:
    """The answers to some prompts while they are written, over an engine that others may use in between.

    What is told of an answer is what it has more than before.

    Args:
        engine: the engine; steps are made inside of its `computing`.
        intake: the way in for prompts.
        tokenizer: the model's, which makes texts; None: pieces have none.
        every_token: whether each token is told; else text is read while it grows only where a text may stop it.

    Attributes:
        going: the prompts whose answers have not been taken by `ended`, by number.
    """

    def __init__(
        self,
        engine: Engine,
        intake: Intake,
        tokenizer: PreTrainedTokenizerFast | None,
        *,
        every_token: bool,
    ):
        self._engine, self._intake, self._tokenizer = engine, intake, tokenizer
        self._every_token = every_token
        self.going: dict[int, Request] = {}
        self._passed: Counter[int] = Counter()
        self._texts: dict[int, AnswerText] = {}

    def ask(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[Request]:
        """Add prompts, all or none, numbered from 0; errors are those of `Intake.add`."""
        requests = self._intake.add(self._engine, prompts, samplings)
        self.going.update(enumerate(requests))
        return requests

    def ask_one(
        self, number: int, prompt: Sequence[int], sampling: Sampling, matcher: Matcher | None
    ) -> None:
        """Add a prompt under a number; errors are those of `Intake.add_one`."""
        self.going[number] = self._intake.add_one(self._engine, prompt, sampling, matcher)

    def step(self) -> list[Piece]:
        """Make a step if an answer needs one; return what is new."""
        if not all(_has_ended(request) for request in self.going.values()):
            self._engine.step()
        return [
            piece
            for number, request in self.going.items()
            if self._every_token or request.sampling.stop
            for piece in self._pieces(number, request)
        ]

    def ended(self) -> list[tuple[int, Request]]:
        """Return the prompts whose answers have all ended since the last call, with their numbers."""
        ended = [(number, request) for number, request in self.going.items() if _has_ended(request)]
        for number, request in ended:
            self._forget(number, request)
        return ended

    def end(self, number: int, answer: int) -> None:
        """End one of the answers to a prompt, as a text that stops it does."""
        for request in _members(self.going.get(number)):
            if request.index == answer and request.ending is None:
                self._engine.end(request, "stop")

    def cancel(self, number: int) -> None:
        """End all answers to a prompt, whatever they do; nothing more is told of them."""
        request = self.going.get(number)
        for member in _members(request):
            self._engine.cancel(member.number)
        if request is not None:
            self._forget(number, request)

    def close(self) -> None:
        """Cancel what has not ended."""
        for number in [*self.going]:
            self.cancel(number)

    def output(self, request: Request) -> Output:
        """Return the answers to a prompt, which have ended.

        Raises:
            ConfigError: an answer could not be held to its form.
        """
        check_form(request)
        answers = [
            Answer(
                tuple(answer.answer), self._text(answer), answer.ending or "cancelled", tuple(answer.logprobs)
            )
            for answer in _members(request)
        ]
        return Output(request.prompt, tuple(answers), tuple(request.prompt_logprobs))

    def _forget(self, number: int, request: Request) -> None:
        del self.going[number]
        for member in _members(request):
            self._passed.pop(member.number, None)
            self._texts.pop(member.number, None)

    def _pieces(self, number: int, first: Request) -> Iterator[Piece]:
        """Yield the pieces of a prompt's answers that were not told before."""
        for request in [first, *first.siblings]:
            while self._passed[request.number] < len(request.answer):
                self._passed[request.number] += 1
                yield self._piece(request, number, self._passed[request.number])

    def _piece(self, request: Request, number: int, count: int) -> Piece:
        """Return the piece of token number `count` of an answer; end the answer there if a text of `stop` is met."""
        text, token = "", request.answer[count - 1]
        if self._tokenizer is not None:
            writer = self._texts.get(request.number)
            if writer is None:
                writer = AnswerText(self._tokenizer, request.prompt, request.sampling.stop)
                self._texts[request.number] = writer
            writer.add(token)
            if writer.is_stopped:
                self._engine.end(request, "stop")
                del request.answer[count:], request.logprobs[count:]
            is_last = request.ending is not None and count == len(request.answer)
            if is_last:
                writer.finish()
            text = writer.pass_on(ends=is_last)
            request.text = writer.text
        ending = request.ending if count == len(request.answer) else None
        logprob = request.logprobs[count - 1] if request.logprobs else None
        return Piece(number, request.index, token, text, ending, logprob)

    def _text(self, request: Request) -> str:
        """Return the text of an answer that has ended."""
        if self._tokenizer is None or request.sampling.stop:
            return request.text
        writer = AnswerText(self._tokenizer, request.prompt, ())
        writer.add_all(request.answer)
        return writer.text


def check_form(request: Request) -> None:
    """Raise ConfigError where an answer to a prompt ended as nothing could be held to its form."""
    for answer in _members(request):
        if answer.ending == "failed":
            raise ConfigError("llguidance gave up on the form of an answer", cause=answer.fault)


def _members(request: Request | None) -> list[Request]:
    return [] if request is None else [request, *request.siblings]


def _has_ended(request: Request) -> bool:
    """Return whether all answers to a request's prompt have ended."""
    return request.ending is not None and all(answer.ending is not None for answer in request.siblings)
