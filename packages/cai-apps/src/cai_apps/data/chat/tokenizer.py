"""A tokenizer for conversations, trained here: for models that have none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cai_apps.data.chat.messages import Conversation
from cai_apps.data.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, the form that many models have."""


def train_chat_tokenizer(conversations: Iterable[Conversation], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on what messages say, with a template of the form of ChatML.

    Raises:
        ConfigError: the vocabulary is too small.
        DataError: there is no message.
    """

    def texts() -> Iterator[str]:
        for conversation in conversations:
            yield from (f"{message.role}\n{message.content}" for message in conversation.messages)

    return train_text_tokenizer(texts(), vocab_size)


def train_text_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train on any texts, as `train_chat_tokenizer` does: for a base that is to learn conversations."""
    tokenizer = train_tokenizer(texts, vocab_size, controls=(START, END))
    tokenizer.eos_token = END
    tokenizer.chat_template = TEMPLATE
    return tokenizer
