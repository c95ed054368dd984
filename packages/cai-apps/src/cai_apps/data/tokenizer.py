"""A byte-level BPE trained on the run's own text, or a tokenizer loaded from an HF directory or hub id; texts to ids.

A document's ids are the tokenizer's own prefix (often <s>), the text, its suffix, and the end-of-sequence token once. A
prompt's are the prefix and the text: what follows is for the model to say. Control tokens written in a text, such as
</s>, are text like any other, unless they are to be parsed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cai_apps.config.panics import is_panic
from cai_mesh.errors import CaiError, ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SpecialTokens = Literal["text", "parse"]
"""Whether control tokens written in a text are text, or the tokens that they spell."""
END_OF_TEXT = "<|endoftext|>"
ALPHABET = 256


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, controls: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with at most `vocab_size` tokens, id 0 being the end-of-text token, control tokens the next.

    Raises:
        ConfigError: the vocabulary cannot hold the 256 bytes and the end-of-text token.
        DataError: there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size <= ALPHABET + len(controls):
        raise ConfigError(
            "the model's vocabulary is too small for a byte-level tokenizer",
            got=vocab_size,
            expected=f"at least {ALPHABET + 1 + len(controls)}",
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
        special_tokens=[END_OF_TEXT, *controls],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(all_texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of an HF directory or hub id.

    Raises:
        ConfigError: there is none, its rules are broken, or it has no end-of-sequence token to join documents with.
    """
    from transformers import AutoTokenizer

    place = Path(name).expanduser()
    with tokenizer_refusals(str(name)):
        tokenizer = AutoTokenizer.from_pretrained(place if place.exists() else name, trust_remote_code=False)
        affixes(tokenizer)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer {str(name)!r} has no end-of-sequence token",
            expected="an eos_token",
            cause="a model learns by it where to stop",
            fix="set eos_token in its tokenizer_config.json to the token that ends a text or an answer",
        )
    return tokenizer


@contextmanager
def tokenizer_refusals(name: str) -> Iterator[None]:
    """Inside, what a tokenizer's code raises over its own files is raised as a ConfigError that names the tokenizer."""
    try:
        yield
    except CaiError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise ConfigError(
            f"no tokenizer {name!r} that can be used",
            got="rules that are broken" if is_panic(error) else None,
            expected="'train', a directory with an HF tokenizer, or a hub id that can be downloaded",
            cause=(str(error).splitlines() or [type(error).__name__])[0],
            fix="copy or download its files again; tokenizer.json is where its rules are",
        ) from None


def document_ids(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], special_tokens: SpecialTokens = "text"
) -> list[list[int]]:
    """Return the ids of documents: the tokenizer's prefix, the text, its suffix, and the end-of-sequence token once.

    Args:
        tokenizer: a tokenizer with an end-of-sequence token.
        texts: the documents.
        special_tokens: whether control tokens in the texts are text, or parsed.
    """
    prefix, suffix = affixes(tokenizer)
    end = [tokenizer.eos_token_id]
    closing = suffix if suffix[-1:] == end else [*suffix, *end]
    documents = []
    for ids in _text_ids(tokenizer, texts, special_tokens):
        is_closed = closing == end and ids[-1:] == end
        documents.append([*prefix, *ids, *([] if is_closed else closing)])
    return documents


def prompt_ids(
    tokenizer: PreTrainedTokenizerFast, text: str, special_tokens: SpecialTokens = "text"
) -> list[int]:
    """Return the ids of a text that is to be continued: the beginning of a document's, without its end."""
    return [*affixes(tokenizer)[0], *_text_ids(tokenizer, [text], special_tokens)[0]]


def _text_ids(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], special_tokens: SpecialTokens
) -> list[list[int]]:
    options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    with tokenizer_refusals(tokenizer.name_or_path):
        encoded = tokenizer(list(texts), split_special_tokens=special_tokens == "text", **options)
    documents = [list(ids) for ids in encoded["input_ids"]]
    if not any(documents) and any(text.strip() for text in texts):
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path!r} makes nothing of text",
            got=next(text for text in texts if text.strip())[:40],
            expected="ids",
            cause="its vocabulary has none of the text's letters, and nothing for what it does not know",
        )
    return documents


def affixes(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and after every text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return framed[:start], framed[start + len(plain) :]
    raise ConfigError(
        "the tokenizer changes a text where it adds its special tokens",
        got=f"'a' is {plain}, and {framed} with them",
        expected="special tokens before and after the text alone",
    )


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a digest of all that decides which ids a text has, whatever the tokenizer is called."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        rules = {key: value for key, value in rules.items() if key not in ("truncation", "padding")}
    else:
        file = getattr(tokenizer, "vocab_file", None)
        model = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
        rules = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab(), "model": model}
    content = [rules, tokenizer.bos_token_id, tokenizer.eos_token_id, *affixes(tokenizer)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
