"""A conversation as ids, and which of them are trained on.

The ids are those of the whole text, tokenized once: what a model is given when the conversation goes on. What is
trained on is what the model writes in it: from where an answer may begin (after `<|im_start|>assistant` and its like)
to the token that ends it. Both are places in the text:

- as the template says by {% generation %}, or else
- by prefixes: an answer begins where the text of the messages before it, with the generation prompt, ends, and it ends
  where the text up to it ends. White space that a template writes after the last token is not trained on: no model
  writes it. A text that is no prefix of the whole is refused, as it does not say where anything is.

A token that spans the beginning of an answer is the prompt's if what it takes of the answer is white space (the model
is then given the prompt with another token there, and what follows is the same); if it takes more, the
conversation is refused. An answer that no token of the vocabulary ends is refused: nobody would stop such a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from cai_apps.data.chat.control import ControlTokens, Pieces, place_without
from cai_apps.data.chat.messages import ASSISTANT, ROLES, Conversation
from cai_apps.data.chat.spans import LETTERS, Places
from cai_apps.data.chat.template import ChatTemplate, roles_of
from cai_apps.data.tokenizer import SpecialTokens
from cai_mesh.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LAST, ALL = "last", "all"


@dataclass(frozen=True)
class Example:
    """The ids of a conversation, int64 [n], and which are trained on, bool [n]."""

    ids: np.ndarray
    trained: np.ndarray


def check_trained(trained: Sequence[str]) -> tuple[str, ...]:
    """Return what is trained on: `LAST` or `ALL` answers, or the roles that are named.

    Raises:
        ConfigError: it is none of these.
    """
    for name in trained:
        if name not in (LAST, ALL, *ROLES):
            raise ConfigError(
                f"data.trained has an unknown role {name!r}",
                expected=f"{LAST!r}, {ALL!r}, or some of {', '.join(ROLES)}",
                fix=did_you_mean(name, (LAST, ALL, *ROLES)),
            )
    if not trained or (len(trained) > 1 and {LAST, ALL} & {*trained}):
        raise ConfigError(
            "data.trained names nothing, or two things at once",
            got=", ".join(trained) or "nothing",
            expected=f"{LAST!r} or {ALL!r} alone, or roles",
        )
    return tuple(trained)


class Renderer:
    """Makes examples of conversations.

    Args:
        tokenizer: the model's tokenizer, one of the package tokenizers.
        template: the template that writes conversations.
        trained: `LAST` or `ALL` answers, or roles.
        special_tokens: whether control tokens in a message are text, or parsed.

    Raises:
        ConfigError: the tokenizer cannot say which letters a token stands for, or `trained` is no role.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template: ChatTemplate,
        trained: Sequence[str] = (ALL,),
        special_tokens: SpecialTokens = "text",
    ):
        self._template, self._trained = template, check_trained(trained)
        self._control = ControlTokens(tokenizer, special_tokens)
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id

    def render(self, conversation: Conversation) -> Example:
        """Return the example of a conversation.

        Raises:
            DataError: the template refuses it, or it does not say what would be trained on.
        """
        return self.pieces(conversation)[0]

    def pieces(self, conversation: Conversation) -> tuple[Example, list[tuple[str, bool]]]:
        """Return an example, and its text in parts that are trained on or not."""
        safe, mark = self._control.mark(conversation)
        rendering = self._template.write(safe)
        places = Places(self._template, safe, rendering, self._control.end_after)
        places.check_complete()
        turns = self._turns(safe)
        answers = [turn for turn in turns if safe.messages[turn].role == ASSISTANT]
        questions = [turn for turn in turns if turn not in answers]
        tokens = self._control.tokenize(rendering.text, mark)
        trained = np.zeros(len(tokens.ids), dtype=bool)

        def within(span: tuple[int, int], *, is_answer: bool) -> np.ndarray:
            start, end = (place_without(mark, rendering.text, place) for place in span)
            return _tokens_within(tokens, start, end, is_answer=is_answer)

        for spans in places.answers(answers):
            marks = [within(span, is_answer=True) for span in spans]
            self._check_end(tokens, marks[-1])
            trained |= np.any(marks, axis=0)
        for span in places.contents(questions):
            trained |= within(span, is_answer=False)
        ids = np.array(tokens.ids, dtype=np.int64)
        if len(ids) > 1 and ids[0] == ids[1] == self._bos != self._eos:
            raise DataError(
                "the conversation begins with the token of a beginning twice",
                got=repr(rendering.text[:LETTERS]),
                fix="write {{ bos_token }} once in the chat template",
            )
        return Example(ids, trained), _parts(tokens, trained)

    def question(self, conversation: Conversation) -> list[int]:
        """Return the ids of a conversation up to where the assistant's next answer begins.

        Raises:
            DataError: the template refuses it.
        """
        safe, mark = self._control.mark(conversation)
        return self._control.tokenize(self._template.write(safe, answer_follows=True).text, mark).ids

    def end_of(self, example: Example) -> int:
        """Return the id of the last control token that is trained on; -1: there is none."""
        numbers = reversed(example.ids[example.trained].tolist())
        return next((number for number in numbers if self._control.is_control(number)), -1)

    def _turns(self, conversation: Conversation) -> list[int]:
        """Return the numbers of the messages that are trained on."""
        roles = {ASSISTANT} if {LAST, ALL} & {*self._trained} else {*self._trained}
        numbered = enumerate(conversation.messages)
        turns = [number for number, message in numbered if message.role in roles and message.trained]
        if not turns:
            raise DataError(
                "the conversation has no answer to train on",
                got=f"the roles {roles_of(conversation.messages)}",
                expected=f"a message of {' or '.join(sorted(roles))} that has no weight of 0",
                fix="leave out the conversation, or name other roles as data.trained",
            )
        return turns[-1:] if self._trained == (LAST,) else turns

    def _check_end(self, tokens: Pieces, marks: np.ndarray) -> None:
        """Raise DataError where the last token of an answer, but for white space, is no control token."""
        numbers = np.flatnonzero(marks).tolist()
        for number in reversed(numbers):
            if self._control.is_control(tokens.ids[number]):
                return
            if not tokens.text[tokens.starts[number] : tokens.ends[number]].isspace():
                break
        end = tokens.ends[numbers[-1]] if numbers else 0
        raise DataError(
            "an answer ends with no token of its own, by which the model would stop",
            got=repr(tokens.text[max(0, end - LETTERS) : end]),
            expected="such as <|im_end|>, </s> or <|eot_id|>, which are one token each",
            cause="the chat template writes none there, or the tokenizer does not know it",
            fix="write {{ eos_token }} after each answer in a template of your own (data.chat_template), inside "
            "{% generation %} where it has that",
        )


def render(
    tokenizer: PreTrainedTokenizerFast,
    template: ChatTemplate,
    conversation: Conversation,
    trained: Sequence[str] = (ALL,),
) -> Example:
    """Return the example of one conversation.

    Args:
        tokenizer: the model's tokenizer.
        template: the template that writes it.
        conversation: the messages and tools.
        trained: `LAST` or `ALL` answers, or roles.

    Raises:
        DataError: the template refuses it, or it does not say what would be trained on.
    """
    return Renderer(tokenizer, template, trained).render(conversation)


def truncate(example: Example, length: int) -> Example | None:
    """Return the first tokens of an example; of an answer that is cut, what is left is trained on, without an end.

    Returns None where nothing is left that is trained on.
    """
    if len(example.ids) <= length:
        return example
    shortened = Example(example.ids[:length], example.trained[:length])
    return shortened if shortened.trained.any() else None


def _tokens_within(tokens: Pieces, start: int, end: int, *, is_answer: bool) -> np.ndarray:
    """Return which tokens stand for a part of a text, bool [n].

    Args:
        tokens: the tokens of the text.
        start: the first letter of the part.
        end: the letter after its last.
        is_answer: the text before the part is given to the model, so that no token may span its beginning.
    """
    text, first, last = tokens.text, tokens.starts, tokens.ends
    marks = (first >= start) & (last <= end) & (last > first)
    for token in np.flatnonzero((first < end) & (last > end)):
        if first[token] < start or not text[end : last[token]].isspace():
            raise _merged(tokens, int(token), "end")
        marks[token] = True
    for token in np.flatnonzero((first < start) & (last > start)):
        marks[token] = not is_answer and text[first[token] : start].isspace()
        if not (marks[token] or text[start : last[token]].isspace()):
            raise _merged(tokens, int(token), "beginning")
    return marks


def _merged(tokens: Pieces, token: int, where: str) -> DataError:
    start, end = int(tokens.starts[token]), int(tokens.ends[token])
    return DataError(
        f"a token spans the {where} of an answer",
        got=f"{tokens.text[start:end]!r} in {tokens.text[max(0, start - LETTERS) : end + LETTERS]!r}",
        expected="a token that ends there",
        cause="prompt and answer would be other tokens when the model is used",
        fix="write a line feed or a special token there in a template of your own (data.chat_template)",
    )


def _parts(tokens: Pieces, trained: np.ndarray) -> list[tuple[str, bool]]:
    """Return the text in parts that are trained on or not."""
    changes = [0, *(np.flatnonzero(np.diff(trained)) + 1), len(trained)]
    parts = []
    position = 0
    for first, after in pairwise(changes):
        end = len(tokens.text) if after == len(trained) else max(position, int(tokens.starts[after]))
        parts.append((tokens.text[position:end], bool(trained[first])))
        position = end
    return parts
