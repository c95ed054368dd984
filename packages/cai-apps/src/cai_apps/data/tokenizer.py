"""A byte-level BPE trained on the run's own text, or a tokenizer loaded from an HF directory or hub id."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cai_mesh.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
ALPHABET = 256


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with at most `vocab_size` tokens, id 0 being the end-of-text token.

    Raises:
        ConfigError: the vocabulary cannot hold the 256 bytes and the end-of-text token.
        DataError: there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size <= ALPHABET:
        raise ConfigError(
            "the model's vocabulary is too small for a byte-level tokenizer",
            got=vocab_size,
            expected=f"at least {ALPHABET + 1}",
        )
    texts = iter(documents)
    first = next(texts, None)
    if first is None:
        raise DataError("the dataset is empty", got="no document with text", expected="at least one")

    def all_texts():
        yield first
        yield from texts

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(all_texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of an HF directory or hub id.

    Raises:
        ConfigError: there is none, or it has no end-of-sequence token to join documents with.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            Path(name).expanduser() if Path(name).expanduser().exists() else name, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer {str(name)!r}",
            expected="'train', a directory with an HF tokenizer, or a hub id that can be downloaded",
            cause=str(error).splitlines()[0],
        ) from None
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer {str(name)!r} has no end-of-sequence token", expected="an eos_token"
        )
    return tokenizer
