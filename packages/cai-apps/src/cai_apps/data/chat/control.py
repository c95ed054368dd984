"""Tokens of a text with the letters that each stands for; control tokens that a message spells are text.

A special token that somebody writes in a message, such as `</s>`, would end a turn where none ends. Where messages are
not to be parsed it is marked before the template writes them, and tokenized apart as the letters that it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cai_apps.data.chat.messages import Conversation
from cai_apps.data.tokenizer import SpecialTokens
from cai_mesh.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARKS = range(0xF0000, 0xFFFFE)
"""Letters for private use, of which one that no message has is a mark."""


@dataclass(frozen=True)
class Pieces:
    """Tokens of a text.

    Args:
        text: the text.
        ids: the ids, [n].
        starts: the first letter of each token, int64 [n].
        ends: the letter after its last, int64 [n].
    """

    text: str
    ids: list[int]
    starts: np.ndarray
    ends: np.ndarray


class ControlTokens:
    """The control tokens of a tokenizer, and texts tokenized with and without them.

    Args:
        tokenizer: a tokenizer of the package tokenizers.
        special_tokens: whether control tokens in a message are text, or parsed.

    Raises:
        ConfigError: the tokenizer is of another kind.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, special_tokens: SpecialTokens):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"the tokenizer {tokenizer.name_or_path!r} does not say which letters a token stands for",
                got=type(tokenizer).__name__,
                expected="one with a tokenizer.json",
                fix="convert it with transformers' PreTrainedTokenizerFast",
            )
        self._rules = type(backend).from_str(backend.to_str())
        self._rules.post_processor = None  # it adds tokens at both ends, and trims what tokens stand for
        self._rules.no_truncation()
        self._rules.no_padding()
        self._added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        self._numbers = {*self._added.values()}
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = _any_of(special) if special_tokens == "text" else None
        self._end = re.compile(rf"\s*(?:{_any_of([*self._added]).pattern})")

    def is_control(self, number: int) -> bool:
        """Whether an id is that of an added token."""
        return number in self._numbers

    def end_after(self, text: str, position: int) -> int:
        """Return where the control token ends that follows at a place of a text; the place where none does."""
        match = self._end.match(text, position)
        return position if match is None else match.end()

    def mark(self, conversation: Conversation) -> tuple[Conversation, str]:
        """Return a conversation whose spelled control tokens are marked inside, and the mark; "": there are none."""
        if self._special is None or not any(map(self._special.search, _strings(_values(conversation)))):
            return conversation, ""
        letters = {letter for text in _strings(_values(conversation)) for letter in text}
        mark = next(chr(number) for number in MARKS if chr(number) not in letters)
        special = self._special

        def marked(text: str) -> str:
            return special.sub(lambda match: match[0][0] + mark + match[0][1:], text)

        messages = tuple(
            replace(
                message,
                content=marked(message.content),
                reasoning=_changed(message.reasoning, marked),
                tool_calls=_changed(message.tool_calls, marked),
            )
            for message in conversation.messages
        )
        return Conversation(messages, _changed(conversation.tools, marked)), mark

    def tokenize(self, text: str, mark: str) -> Pieces:
        """Return the tokens of a text.

        Args:
            text: the text that a template has written.
            mark: the letter inside control tokens that are text; "": there are none.

        Raises:
            DataError: a control token cannot be written as text.
        """
        if not mark:
            return self._join([self._encode(text)], text)
        special, rules = self._special, self._rules
        assert special is not None
        encodings, position, written = [], 0, ""
        spelled = re.compile(
            "|".join(re.escape(name[0] + mark + name[1:]) for name in _longest_first(self._added))
        )
        for match in [*spelled.finditer(text), None]:
            plain = text[position : match.start() if match else len(text)].replace(mark, "")
            pieces = [(plain, False)]
            if match is not None:
                pieces.append((match[0].replace(mark, "", 1), True))
                position = match.end()
            for piece, as_text in pieces:
                rules.encode_special_tokens = as_text
                encodings.append(self._encode(piece, len(written)))
                rules.encode_special_tokens = False
                if as_text and self._added[piece] in encodings[-1][0]:
                    raise DataError(
                        f"{piece!r} in a message cannot be read as text",
                        cause="the tokenizer makes the token of it wherever it stands",
                        fix='data.special_tokens = "parse" reads it as the token; or take it out of the message',
                    )
                written += piece
        return self._join(encodings, written)

    def _encode(self, text: str, position: int = 0) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and letters of a piece of a text that begins at `position` of it."""
        if not text:
            return [], []
        if not position:
            encoding = self._rules.encode(text, add_special_tokens=False)
            return encoding.ids, encoding.offsets
        lead = "\n"  # a word at the beginning of a text is another than one within it
        encoding = self._rules.encode(lead + text, add_special_tokens=False)
        skip = next((number for number, (_, end) in enumerate(encoding.offsets) if end > 1), len(encoding))
        shift = position - 1
        if skip < len(encoding) and encoding.offsets[skip][0] < 1:
            encoding, skip, shift = self._rules.encode(text, add_special_tokens=False), 0, position
        offsets = [(start + shift, end + shift) for start, end in encoding.offsets[skip:]]
        return encoding.ids[skip:], offsets

    def _join(self, encodings: list[tuple[list[int], list[tuple[int, int]]]], text: str) -> Pieces:
        offsets = np.array([pair for _, pairs in encodings for pair in pairs], dtype=np.int64).reshape(-1, 2)
        return Pieces(text, [number for ids, _ in encodings for number in ids], offsets[:, 0], offsets[:, 1])


def place_without(mark: str, text: str, place: int) -> int:
    """Return a place of a text as it is without the marks before it."""
    return place - text.count(mark, 0, place) if mark else place


def _any_of(names: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, _longest_first(names))) or "(?!)")


def _longest_first(names: Iterable[str]) -> list[str]:
    return sorted((name for name in names if len(name) > 1), key=len, reverse=True)


def _values(conversation: Conversation) -> list[Any]:
    """Return all that a conversation brings into a text."""
    messages = conversation.messages
    return [[message.content, message.reasoning, message.tool_calls] for message in messages] + [
        conversation.tools
    ]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for entry in value.values() for text in _strings(entry)]
    if isinstance(value, list | tuple):
        return [text for entry in value for text in _strings(entry)]
    return []


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value whose strings are changed, but for the names in its objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _changed(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_changed(entry, change) for entry in value)
    return value
