"""Output without control characters: names of files and their contents cannot steer the terminal that shows them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls but for tab and line feed, what turns the direction of text, and bytes that are no text."""


def printable(text: str) -> str:
    """Return a text in which each character of `STEERING` is written out, as \\x1b."""
    return STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class PrintableStream:
    """A text stream whose texts are made printable; the rest is as `stream` has it.

    A carriage return that begins a text is kept: bars of progress are drawn so.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        begins = "\r" if text.startswith("\r") else ""
        self.stream.write(begins + printable(text.removeprefix("\r")))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def terminal() -> TextIO:
    """Return standard output as it is, for what draws with control characters of its own."""
    return sys.stdout.stream if isinstance(sys.stdout, PrintableStream) else sys.stdout


@contextmanager
def printable_output() -> Iterator[None]:
    """Inside, what is printed is printable."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(PrintableStream, before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
