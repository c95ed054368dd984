"""Conversations written as one string, as in Anthropic's HH: a blank line, who speaks, and what is said.

Bai et al., "Training a Helpful and Harmless Assistant with Reinforcement Learning from Human Feedback",
arXiv:2204.05862.
"""

from __future__ import annotations

import re

from cai_apps.data.chat.messages import ASSISTANT, USER, Message, read_message

SPEAKERS = {"Human": USER, "Assistant": ASSISTANT}
TURN = re.compile(r"\n\n(Human|Assistant):")


def is_dialogue(text: str) -> bool:
    """Return whether a text begins as such a conversation does."""
    return TURN.match(text) is not None


def parse_dialogue(dialogue: str, place: str) -> tuple[Message, ...]:
    """Return the messages of a text for which `is_dialogue` holds, without white space around them.

    Args:
        dialogue: the conversation.
        place: the name by which an error calls it.

    Raises:
        DataError: an answer is empty.
    """
    _, *parts = TURN.split(dialogue)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return tuple(
        read_message({"role": SPEAKERS[speaker], "content": text.strip()}, f"message {number} of {place}")[0]
        for number, (speaker, text) in enumerate(turns, start=1)
    )
