"""Single tokens as text and as bytes, for log-probabilities: a token may be part of a letter."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""What tokenizers of sentencepiece call a byte."""
UNREADABLE = "\ufffd"


@lru_cache
def _byte_of_letter() -> dict[str, int]:
    """Return the byte that each letter stands for in vocabularies of bytes, as GPT-2's: those that can be printed for
    themselves, and the others by letters from 256 on, in their order.
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(number): number for number in printed}
    rest = (number for number in range(256) if number not in printed)
    return letters | {chr(256 + place): number for place, number in enumerate(rest)}


class Letters:
    """The tokens of a vocabulary as text and bytes.

    Args:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token: int) -> tuple[str, list[int]]:
        """Return the text of a token, and its bytes."""
        pair = self._known.get(token)
        if pair is None:
            pair = self._known[token] = self._read(token)
        return pair

    def _read(self, token: int) -> tuple[str, list[int]]:
        text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        name = str(self._tokenizer.convert_ids_to_tokens(token) or "")
        match = BYTE.fullmatch(name)
        if match is not None:
            return text, [int(match[1], 16)]
        if UNREADABLE in text:
            values = [_byte_of_letter().get(letter) for letter in name]
            numbers = [value for value in values if value is not None]
            if len(numbers) == len(values):
                return text, numbers
        return text, [*text.encode("utf-8", "replace")]
