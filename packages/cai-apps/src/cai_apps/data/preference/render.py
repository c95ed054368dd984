"""Preferences as ids, of which only those of the answers are scored.

Prompt and answer are rendered as one conversation whose prompt is not trained on, so that an answer has the ids that
it has after that prompt, up to the token that ends it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cai_apps.data.chat.messages import Conversation
from cai_apps.data.chat.render import Example, Renderer
from cai_apps.data.preference.records import Judged, Messages, Pair
from cai_mesh.errors import DataError


@dataclass(frozen=True)
class PairExample:
    """Two documents that begin with the same prompt.

    Args:
        prefix: the number of the prompt's tokens, with which both begin.
        chosen: the prompt and the preferred answer.
        rejected: the prompt and the other answer.
    """

    prefix: int
    chosen: Example
    rejected: Example


def conversations_of(preference: Pair | Judged) -> list[Conversation]:
    """Return the conversations whose answers are scored: both of a pair, the chosen one first, or the one."""
    pair = isinstance(preference, Pair)
    answers = [preference.chosen, preference.rejected] if pair else [preference.completion]
    return [Conversation((*preference.prompt, *answer), preference.tools) for answer in answers]


def render_pair(renderer: Renderer, pair: Pair) -> PairExample:
    """Return the two documents of a pair.

    Raises:
        DataError: the template refuses one, no token of an answer is scored, or the prompt has other ids before
            another answer.
    """
    chosen, rejected = (
        _render(renderer, conversation, f'"{key}"')
        for key, conversation in zip(("chosen", "rejected"), conversations_of(pair), strict=True)
    )
    prefix, other = prompt_size(chosen), prompt_size(rejected)
    if prefix != other or not np.array_equal(chosen.ids[:prefix], rejected.ids[:prefix]):
        raise DataError(
            "the prompt has other tokens before one answer than before the other",
            got=f"{prefix} tokens before the chosen answer, {other} before the rejected one",
            expected="the same ones",
            cause="an answer begins with white space that joins the prompt's last token, or the template writes a "
            "prompt in another way before some answers",
            fix="strip the answers, or use a template that ends the prompt with a special token or a line feed",
        )
    return PairExample(prefix, chosen, rejected)


def render_judged(renderer: Renderer, judged: Judged, completion: Messages | None = None) -> Example:
    """Return the document of a judged answer.

    Args:
        renderer: renders conversations.
        judged: the prompt, and the answer.
        completion: an answer in place of the record's own.

    Raises:
        DataError: the template refuses it, or no token of the answer is scored.
    """
    answer = judged.completion if completion is None else completion
    return _render(renderer, Conversation((*judged.prompt, *answer), judged.tools), "of the record")


def prompt_size(example: Example) -> int:
    """Return the number of tokens before the first that is scored."""
    return int(example.trained.argmax())


def _render(renderer: Renderer, conversation: Conversation, place: str) -> Example:
    example = renderer.render(conversation)
    if not example.trained[1:].any():  # a document's first token is nobody's target
        raise DataError(f"no token of the answer {place} is scored", expected="at least one")
    return example
