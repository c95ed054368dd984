"""Where in its text the answers of a conversation stand, as the template marks them or as its prefixes say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cai_apps.data.chat.messages import ASSISTANT, Conversation
from cai_apps.data.chat.template import ChatTemplate, Rendering, Spans
from cai_mesh.errors import DataError

LETTERS = 40
"""Letters of a text that an error shows."""


@dataclass(frozen=True)
class Places:
    """The text of a conversation, and where its messages stand in it.

    Args:
        template: the template that has written it.
        conversation: the messages and tools.
        rendering: the text.
        end_after: (text, place) -> where the control token ends that follows there.
    """

    template: ChatTemplate
    conversation: Conversation
    rendering: Rendering
    end_after: Callable[[str, int], int]

    def answers(self, turns: Sequence[int]) -> list[Spans]:
        """Return the parts of the text that each of some answers is, up to the token that ends it.

        Args:
            turns: the numbers of the messages, all of the assistant.

        Raises:
            DataError: the text does not say where they stand.
        """
        if turns and self.template.marks_answers(self.conversation):
            return self._marked(turns)
        return [(self._answer(turn),) for turn in turns]

    def contents(self, turns: Sequence[int]) -> Spans:
        """Return where the contents of messages stand that are no answers, with the control token that follows them.

        Args:
            turns: the numbers of the messages.

        Raises:
            DataError: the text does not say where they stand.
        """
        return tuple(map(self._content, turns))

    def check_complete(self) -> None:
        """Raise DataError where the template leaves out a message, thoughts, calls or tools."""
        source, messages = self.template.source(self.conversation), self.conversation.messages
        for present, words, what in (
            (self.conversation.tools, ("tools",), "tools"),
            (any(message.tool_calls for message in messages), ("tool_calls",), "calls of tools"),
            (
                any(message.reasoning for message in messages),
                ("reasoning", "thinking"),
                "reasoning apart from answers",
            ),
        ):
            if present and not any(word in source for word in words):
                raise DataError(
                    f"{self.template.origin} writes no {what}",
                    got=f"a conversation with {what}",
                    expected=f"a template that reads {' or '.join(words)}",
                    fix="name one as data.chat_template, or leave this out of the file",
                )
        for number, message in enumerate(messages):
            if self._is_left_out(number):
                raise DataError(
                    f"{self.template.origin} leaves out message {number + 1}, the {message.role}'s",
                    got=repr(message.content.strip()[:LETTERS]),
                    fix="name a template that writes it as data.chat_template, or leave it out of the file",
                )

    def _is_left_out(self, number: int) -> bool:
        """Whether the text is the same without a message."""
        messages = self.conversation.messages
        message, content = messages[number], messages[number].content.strip()
        if not content or (len(content) > LETTERS and content in self.rendering.text):
            return False
        if (
            message.role == ASSISTANT
        ):  # earlier answers may be shortened; those with calls may lose what they say
            return (
                bool(message.tool_calls) and content not in self.rendering.text and "</think>" not in content
            )
        try:
            if number:
                return self._text(number) == self._text(number + 1)
            return (
                self.template.write(replace(self.conversation, messages=messages[1:])).text
                == self.rendering.text
            )
        except DataError:  # what is before the message, or after it, is no conversation by itself
            return False

    def _text(self, count: int, *, answer_follows: bool = False) -> str:
        """Return the text of the first messages."""
        if count == len(self.conversation.messages) and not answer_follows:
            return self.rendering.text
        return self.template.write(self.conversation, count, answer_follows=answer_follows).text

    def _answer(self, turn: int) -> tuple[int, int]:
        """Return where an answer begins and ends: what the texts of two prefixes differ in."""
        text, prompt, through = (
            self.rendering.text,
            self._text(turn, answer_follows=True),
            self._text(turn + 1),
        )
        for part, what in ((prompt, "with the generation prompt"), (through, "up to its end")):
            if not text.startswith(part):
                raise _ambiguous(text, part, turn, what)
        start, end = len(prompt), len(through.rstrip())
        if end <= start:
            raise DataError(
                f"the chat template writes nothing for message {turn + 1}, the assistant's",
                got=repr(through[-LETTERS:]),
                expected="the answer",
                fix="name a template that writes it as data.chat_template",
            )
        return start, end

    def _content(self, turn: int) -> tuple[int, int]:
        """Return where the text of a message stands that is no answer, with the token that follows it."""
        message = self.conversation.messages[turn]
        before, through, content = (
            self._text(turn) if turn else "",
            self._text(turn + 1),
            message.content.strip(),
        )
        start = len(before) if through.startswith(before) else 0
        if not (content and self.rendering.text.startswith(through) and through.count(content, start) == 1):
            raise DataError(
                f"it is not clear where message {turn + 1}, the {message.role}'s, stands in the text",
                got=repr(through[start:][-2 * LETTERS :]),
                expected="its content, once",
                cause="the chat template writes it changed, not at all, or otherwise once other messages follow",
                fix="train on answers only, or name another template as data.chat_template",
            )
        first = through.index(content, start)
        return first, self.end_after(through, first + len(content))

    def _marked(self, turns: Sequence[int]) -> list[Spans]:
        """Return the parts that the template marks as some answers."""
        every = [turn for turn, message in enumerate(self.conversation.messages) if message.role == ASSISTANT]
        marked = self.rendering.generated
        owned = dict(zip(every, [(span,) for span in marked], strict=False))
        if len(marked) != len(every):
            owned = self._marked_of(every)
        for turn in turns:
            text = "".join(self.rendering.text[start:end] for start, end in owned[turn])
            words = self.conversation.messages[turn].content.split()
            if not text.strip() or (words and words[-1] not in text):
                raise DataError(
                    f"{{% generation %}} of the chat template does not hold the answer of message {turn + 1}",
                    got=repr(text[-LETTERS:]),
                    expected=repr(" ".join(words)[-LETTERS:]),
                    cause="the block stands elsewhere, or in a macro, where its place is not known",
                    fix="put it around the answer and the token that ends it",
                )
        return [owned[turn] for turn in turns]

    def _marked_of(self, every: Sequence[int]) -> dict[int, Spans]:
        """Return the marked parts of all answers: each has as many as it adds to the text before it."""
        owned, total, is_clear = {}, 0, True
        marked = self.rendering.generated
        for turn in every:
            before, after = self._count_marked(turn), self._count_marked(turn + 1)
            is_clear = is_clear and before == total
            owned[turn], total = marked[before:after], after
        if not is_clear or total != len(marked):
            raise DataError(
                "it is not clear which marked part of the text is whose answer",
                got=f"{len(marked)} parts by {{% generation %}}, {total} where the answers are written one by one",
                expected="as many",
                cause="the chat template writes earlier answers otherwise once others follow",
                fix="let the template mark one part an answer",
            )
        return owned

    def _count_marked(self, count: int) -> int:
        """Return how many parts are marked in the text of the first messages."""
        if count == len(self.conversation.messages):
            return len(self.rendering.generated)
        return len(self.template.write(self.conversation, count).generated) if count else 0


def _ambiguous(text: str, part: str, turn: int, what: str) -> DataError:
    """Return the error of a text that is no prefix of the whole."""
    pairs = zip(text, part, strict=False)
    place = next(
        (number for number, (one, other) in enumerate(pairs) if one != other), min(len(text), len(part))
    )
    start = max(0, place - LETTERS // 2)
    return DataError(
        f"it is not clear where the answer of message {turn + 1} stands in the text",
        got=f"{part[start : place + LETTERS]!r} {what}",
        expected=f"{text[start : place + LETTERS]!r}, as in the whole conversation",
        cause="the chat template writes earlier messages otherwise once others follow, or an answer otherwise than it "
        "asks for one; earlier thoughts are often left out",
        fix='train on the last answers only (data.trained = "last"), or name a template with {% generation %} as '
        "data.chat_template",
    )
