"""The chat template that writes a conversation as text: the tokenizer's, or a file's.

A template that writes today's date would write another text every day. Where it lets the date be said, as Llama 3's
does by `date_string`, it is the one that those templates have where nobody says it; where not, it is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from cai_apps.data.chat.messages import ASSISTANT, USER, Conversation, Message
from cai_apps.data.chat.values import LETTERS
from cai_mesh.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates, of a tokenizer that has several."""
DATE = "26 Jul 2024"
GENERATION = "endgeneration"
Spans = tuple[tuple[int, int], ...]
"""Parts of a text: first letter and the one after the last."""


@dataclass(frozen=True)
class Rendering:
    """A conversation as text, and the parts that the template itself marks as the assistant's."""

    text: str
    generated: Spans


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the tokens that it may write.

    Args:
        texts: the templates by name, of which `DEFAULT` is always there.
        tokens: the tokenizer's special tokens by name, as `eos_token`.
        origin: the template's name in errors.
    """

    texts: Mapping[str, str]
    tokens: Mapping[str, Any]
    origin: str

    def source(self, conversation: Conversation) -> str:
        """Return the template that a conversation is written by."""
        return self.texts.get(WITH_TOOLS, self.texts[DEFAULT]) if conversation.tools else self.texts[DEFAULT]

    def marks_answers(self, conversation: Conversation) -> bool:
        """Whether the template says by {% generation %} what the assistant writes."""
        return GENERATION in self.source(conversation)

    def write(
        self, conversation: Conversation, count: int | None = None, *, answer_follows: bool = False
    ) -> Rendering:
        """Return the first messages of a conversation as text.

        Args:
            conversation: the messages and tools.
            count: the number of messages; None: all.
            answer_follows: the text ends where an answer of the assistant begins.

        Raises:
            DataError: the template refuses them.
            ConfigError: the template is broken.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = None if conversation.tools is None else [dict(tool) for tool in conversation.tools]
        source = self.source(conversation)
        try:
            texts, spans = render_jinja_template(
                conversations=[[entry_of(message) for message in conversation.messages[:count]]],
                tools=tools,
                chat_template=source,
                return_assistant_tokens_mask=GENERATION in source,
                add_generation_prompt=answer_follows,
                **{**self.tokens, "date_string": DATE},
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{self.origin} is broken", cause=f"line {error.lineno}: {error.message}", fix="correct it"
            ) from None
        except Exception as error:  # whatever the template's code raises
            raise DataError(
                f"{self.origin} refuses the conversation",
                got=roles_of(conversation.messages[:count]),
                cause=(str(error).splitlines() or [type(error).__name__])[0][: 4 * LETTERS],
                fix="change the conversation, or name a template that takes it as data.chat_template",
            ) from None
        return Rendering(texts[0], tuple(spans[0]) if spans else ())

    @property
    def digest(self) -> str:
        """Digest of all that decides how a conversation is written."""
        content = json.dumps(
            [dict(self.texts), {name: str(token) for name, token in self.tokens.items()}], sort_keys=True
        )
        return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()


def entry_of(message: Message) -> dict[str, Any]:
    """Return a message as templates read it."""
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        entry["tool_calls"] = [dict(call) for call in message.tool_calls]
    options = {
        "reasoning_content": message.reasoning,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }
    return entry | {key: value for key, value in options.items() if value is not None}


def roles_of(messages: Sequence[Message]) -> str:
    """Return the roles of messages in their order."""
    return ", ".join(message.role for message in messages)[: 2 * LETTERS]


def load_template(tokenizer: PreTrainedTokenizerFast, file: str | None = None) -> ChatTemplate:
    """Return a file's template, or the tokenizer's own.

    Args:
        tokenizer: the tokenizer, whose special tokens a template may write.
        file: a file of Jinja text; None: the tokenizer's template is used.

    Raises:
        ConfigError: there is none, it cannot be read, is broken, or writes today's date.
    """
    texts, origin = _own(tokenizer) if file is None else _read(Path(file).expanduser())
    template = ChatTemplate(texts, dict(tokenizer.special_tokens_map), origin)
    for text in texts.values():
        _check(text, origin)
    return template


def _own(tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, str], str]:
    template, origin = tokenizer.chat_template, "the tokenizer's chat template"
    if not template:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            cause="base models often have none: nothing says how a conversation is written as text",
            fix="name a file with a template, such as that of the model's instruct form, as data.chat_template",
        )
    if isinstance(template, str):
        return {DEFAULT: template}, origin
    if DEFAULT not in template:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path!r} has several chat templates and none is the default",
            got=", ".join(template),
            fix="write the one to use into a file and name it as data.chat_template",
        )
    return dict(template), origin


def _read(file: Path) -> tuple[dict[str, str], str]:
    origin = f"the chat template {file}"
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{origin} cannot be read", cause=reason, expected="a file of Jinja text") from None
    if not text.strip():
        raise ConfigError(f"{origin} is empty", expected="Jinja text")
    return {DEFAULT: text}, origin


def _check(text: str, origin: str) -> None:
    """Raise ConfigError for a template that is broken or differs from day to day."""
    trial = Conversation((Message(USER, "a"), Message(ASSISTANT, "b")))
    with contextlib.suppress(DataError):  # it is whole, and wants other messages
        ChatTemplate({DEFAULT: text}, {}, origin).write(trial)
    if "strftime_now" in text and "date_string" not in text:
        raise ConfigError(
            f"{origin} writes today's date",
            got="strftime_now",
            expected="a template that writes the same text every day",
            cause="the same conversation would be other tokens tomorrow",
            fix="save the template with a date in place of strftime_now(...) and name the file as data.chat_template",
        )
