"""The text of an answer while it grows: letters of several tokens, and texts that stop it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEFORE = 6
"""Tokens of the prompt before an answer by which a tokenizer knows whether the answer begins with a space."""
UNFINISHED = "\ufffd"
"""What a tokenizer writes for the first bytes of a letter whose others are in tokens to come."""


class AnswerText:
    """The text of an answer, token by token; tokens that are no text are left out.

    A token's text is the difference of that of a few tokens with and without it, as it may depend on those before.

    Args:
        tokenizer: the model's.
        prompt: ids before the answer.
        stop: texts that end the answer.
        visible: texts of control tokens that are text all the same, by id, as those that begin a call of a tool.

    Attributes:
        text: all that is certain, up to a text that stops it.
        is_stopped: whether such a text was met.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop: Sequence[str],
        *,
        visible: Mapping[int, str] | None = None,
    ):
        self._tokenizer, self._stop, self._visible = tokenizer, tuple(stop), visible or {}
        self._rules = _rules_of(tokenizer)
        self._ids = list(prompt[-BEFORE:])
        self._first, self._end = 0, len(self._ids)
        self.text, self.is_stopped, self._passed = "", False, 0

    def add(self, token: int) -> None:
        """Add the next token."""
        if not self.is_stopped:
            self._ids.append(token)
            self._read(ends=False)

    def add_all(self, tokens: Sequence[int]) -> None:
        """Add the tokens of an answer that nothing stops, at once, and finish."""
        self._ids += tokens
        self._read(ends=True)

    def finish(self) -> None:
        """Add what is left of a letter that never came to its end."""
        if not self.is_stopped:
            self._read(ends=True)

    def pass_on(self, *, ends: bool) -> str:
        """Return text that was not passed on before and will not change.

        Args:
            ends: whether no token follows; else what may be the beginning of a text that stops the answer waits.
        """
        end = len(self.text)
        if not ends and not self.is_stopped:
            end -= max((overlap(self.text, stop) for stop in self._stop), default=0)
        passed, self._passed = self.text[self._passed : end], max(self._passed, end)
        return passed

    def _read(self, *, ends: bool) -> None:
        before, now = (
            self._decoded(self._ids[self._first : self._end]),
            self._decoded(self._ids[self._first :]),
        )
        if now.endswith(UNFINISHED) and not ends:
            return
        length = len(self.text)
        self.text += now[len(before) :]
        self._first, self._end = self._end, len(self._ids)
        self._look_for_stop(length)

    def _look_for_stop(self, length: int) -> None:
        """Cut the text before the first text that stops it, which ends in what came after `length`."""
        places = [self.text.find(stop, max(0, length - len(stop) + 1)) for stop in self._stop]
        place = min((place for place in places if place >= 0), default=-1)
        if place >= 0:
            self.text, self.is_stopped = self.text[:place], True

    def _decoded(self, ids: Sequence[int]) -> str:
        if self._visible.keys().isdisjoint(ids):
            return self._plain(ids)
        texts = []
        for is_visible, run in groupby(ids, self._visible.__contains__):
            part = [*run]
            texts += map(self._visible.__getitem__, part) if is_visible else [self._plain(part)]
        return "".join(texts)

    def _plain(self, ids: Sequence[int]) -> str:
        if self._rules is not None:
            return self._rules.decode(ids, skip_special_tokens=True)
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))


def _rules_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the rules of the package tokenizers by which a tokenizer writes texts, several times as fast as by itself;
    None: its class writes them otherwise.
    """
    from transformers import PreTrainedTokenizerFast

    kind, usual = type(tokenizer), PreTrainedTokenizerFast
    if not issubclass(kind, usual) or kind.decode is not usual.decode or kind._decode is not usual._decode:
        return None
    return tokenizer.backend_tokenizer


def overlap(text: str, stop: str) -> int:
    """Return how many of a text's last letters are the first of a text that stops it."""
    return next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)
