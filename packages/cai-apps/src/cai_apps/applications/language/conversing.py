"""A chat in the terminal: a line is a user's message, and the answer is printed while it is written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from cai_apps.applications.language.generate import Writer, renderer_of
from cai_apps.data.chat.messages import ASSISTANT, SYSTEM, USER, Conversation, Message
from cai_apps.data.chat.render import Renderer
from cai_apps.engine import Sampling
from cai_mesh.errors import CaiError

ANEW = "/new"
"""The line after which all that was said is forgotten."""
HELP = f"A line is a message. {ANEW} begins anew; Ctrl-C ends an answer, Ctrl-D the chat."


def converse(
    writer: Writer,
    sampling: Sampling,
    *,
    system: str | None = None,
    chat_template: Path | None = None,
    lines: TextIO | None = None,
) -> list[Message]:
    """Answer message after message until there is none; return the conversation.

    Args:
        writer: the model.
        sampling: options by which tokens are chosen; each answer has a seed of its own, from this one on.
        system: the system's message.
        chat_template: a file with a chat template; None: the tokenizer's.
        lines: the file that messages are read from; None: the terminal.
    """
    renderer = renderer_of(writer.tokenizer, chat_template)
    first = [] if system is None else [Message(SYSTEM, system)]
    messages = list(first)
    lines = sys.stdin if lines is None else lines
    if lines.isatty():
        print(HELP)
    for number, line in enumerate(_lines(lines)):
        if line == ANEW:
            messages = list(first)
            continue
        messages.append(Message(USER, line))
        seed = None if sampling.seed is None else sampling.seed + number
        try:
            answer = _answered(writer, renderer, messages, replace(sampling, seed=seed))
        except CaiError as error:  # too long, for one: what was said before stays
            messages.pop()
            print(error)
        else:
            messages.append(Message(ASSISTANT, answer))
    return messages


def _lines(lines: TextIO) -> Iterator[str]:
    """Yield lines that are not empty; an interrupt between them ends the chat as the end of the file does."""
    while True:
        if lines.isatty():
            print("> ", end="", flush=True)
        try:
            line = lines.readline()
        except KeyboardInterrupt:
            print()
            return
        if not line:
            return
        if line.strip():
            yield line.strip()


def _answered(writer: Writer, renderer: Renderer, messages: list[Message], sampling: Sampling) -> str:
    """Print an answer while it is written, and return it; an interrupt ends it there."""
    ids = renderer.question(Conversation(tuple(messages)))
    answer = ""
    with contextlib.suppress(KeyboardInterrupt):
        for text in writer.stream(ids, sampling):
            print(text, end="", flush=True)
            answer += text
    print()
    return answer
