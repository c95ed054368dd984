"""What each rank of a model does, in the same order: it obeys, and steps the engine."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cai_apps.serve.errors import one_line
from cai_apps.serve.wire import Ask, End, Forget, Refused
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from cai_apps.engine import LLM, Piece
    from cai_apps.engine.grammar import Matcher
    from cai_apps.serve.pulse import Marks


class Stepper:
    """The answers of one rank.

    Args:
        llm: the model.
        matcher: returns what holds answers to a prompt of this number to their form.
        forget: forgets it.
        marks: counts the steps.

    Attributes:
        answers: the answers that are written.
        digest: the digest of all tokens that were chosen so far, which is the same on all ranks.
    """

    def __init__(
        self, llm: LLM, matcher: Callable[[int], Matcher], forget: Callable[[int], Any], marks: Marks
    ):
        self._matcher, self._forget, self._marks = matcher, forget, marks
        self.answers = llm.answers(every_token=True, texts=False)
        self.digest = 0

    def obey(self, orders: Sequence[Ask | End | Forget]) -> list[Refused]:
        """Do what is wanted; return the prompts that are refused, for the same reasons on all ranks."""
        refused = []
        for order in orders:
            if isinstance(order, Ask):
                try:
                    matcher = None if order.sampling.form is None else self._matcher(order.number)
                    self.answers.ask_one(order.number, order.prompt, order.sampling, matcher)
                except ConfigError as error:
                    refused.append(Refused(order.number, one_line(error), is_form=False))
            elif isinstance(order, Forget):
                self._forget(order.number)
            elif order.answer is None:
                self.answers.cancel(order.number)
            else:
                self.answers.end(order.number, order.answer)
        return refused

    def step(self) -> list[Piece]:
        """Make a step; return what is new."""
        self._marks.count += 1
        pieces = self.answers.step()
        for piece in pieces:
            self.digest = zlib.crc32(b"%d" % piece.token_id, self.digest)
        self._marks.count += 1
        return pieces
