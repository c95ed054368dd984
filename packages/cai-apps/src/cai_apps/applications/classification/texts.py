"""Texts as rows of ids, made once and kept on disk.

    <cache>/<key>/tokenizer/           the tokenizer that made the ids
    <cache>/<key>/training.NAME.bin    rows of what the model reads, int32 [samples, tokens], and labels, int32
    <cache>/<key>/validation.NAME.bin  the same of `data.validation_source`
    <cache>/<key>/texts.json           names of the arrays, classes, numbers of samples

The key is a digest of all that the files depend on: the texts, their fields, the tokenizer's rules and the length.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cai_apps.applications.classification import records
from cai_apps.applications.classification.classes import classes_of, number_of
from cai_apps.applications.classification.config import Data
from cai_apps.data.prepare import check_ids
from cai_apps.data.sealed import key_of, open_or_make
from cai_apps.data.tokenizer import tokenizer_digest, tokenizer_refusals, train_tokenizer
from cai_mesh.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT, AT_ONCE = 1, 1000
CONTROLS = ("[CLS]", "[SEP]", "[PAD]")
TOKENIZER, FACTS, LABELS = "tokenizer", "texts.json", "labels"
Facts = dict[str, Any]


@dataclass(frozen=True)
class Texts:
    """Tokenized texts on disk.

    Args:
        directory: the directory of the cache.
        classes: names of the classes.
        sizes: numbers of samples of "training", and of "validation" where it has a source of its own.
        names: the arrays that the model reads of a text, beside labels.
        length: tokens of a row.
        content: digest of the texts.
        vocabulary: digest of the tokenizer's rules.
    """

    directory: Path
    classes: tuple[str, ...]
    sizes: Mapping[str, int]
    names: tuple[str, ...]
    length: int
    content: str
    vocabulary: str

    @property
    def tokenizer(self) -> Path:
        return self.directory / TOKENIZER

    def rows(self, part: str, indices: np.ndarray) -> dict[str, Tensor]:
        """Return samples of a part by number: what the model reads [n, tokens], and labels [n], int64."""
        arrays = {name: self._array(part, name, (-1, self.length))[indices] for name in self.names}
        arrays[LABELS] = self._array(part, LABELS, (-1,))[indices]
        return {name: torch.from_numpy(values.astype(np.int64)) for name, values in arrays.items()}

    def _array(self, part: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.memmap(self.directory / f"{part}.{name}.bin", np.int32, "r").reshape(shape)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a directory or hub id, with a token that fills texts up.

    Raises:
        ConfigError: there is none that can be used, or no token that could fill texts up.
    """
    from transformers import AutoTokenizer

    place = Path(name).expanduser()
    with tokenizer_refusals(str(name)):
        tokenizer = AutoTokenizer.from_pretrained(place if place.exists() else name, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.bos_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ConfigError(
            f"the tokenizer {str(name)!r} has no token that could fill texts up",
            fix="set pad_token in its tokenizer_config.json",
        )
    return tokenizer


def prepare_texts(
    data: Data, vocab_size: int, longest: int, former: Mapping[int, str] | None, tokenizer: str | Path | None
) -> Texts:
    """Tokenize the texts of a config, unless the cache already holds what comes of them.

    Args:
        data: the sources, fields and length.
        vocab_size: rows of the model's embedding.
        longest: tokens of the longest text that the model takes.
        former: names of a pretrained model's classes.
        tokenizer: the directory or hub id of a tokenizer; None: one is trained on the texts.

    Raises:
        ConfigError: there is no tokenizer that can be used, or the model takes no texts of this length.
        DataError: a source is missing, a record is broken, or classes do not go together.
    """
    if data.sequence_length > longest:
        raise ConfigError(
            "the model takes no texts of this length",
            got=f"data.sequence_length = {data.sequence_length}",
            expected=f"{longest} or less",
        )
    sources = {"training": data.source}
    if data.validation_source is not None:
        sources["validation"] = data.validation_source
    content = key_of(*(records.content(data, source) for source in sources.values()))
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    rules = "trained" if loaded is None else tokenizer_digest(loaded)
    names = None if former is None else [former[number] for number in range(len(former))]
    key = key_of("classified texts", FORMAT, content, rules, data.sequence_length, vocab_size, names)

    def write(directory: Path) -> None:
        _write(directory, data, sources, loaded, vocab_size, former)

    directory = open_or_make(data.cache, key, write)
    facts: Facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
    return Texts(
        directory,
        tuple(facts["classes"]),
        facts["sizes"],
        tuple(facts["names"]),
        data.sequence_length,
        content,
        tokenizer_digest(load_tokenizer(directory / TOKENIZER)),
    )


def _write(
    directory: Path,
    data: Data,
    sources: Mapping[str, str],
    tokenizer: PreTrainedTokenizerFast | None,
    vocab_size: int,
    former: Mapping[int, str] | None,
) -> None:
    training = sources["training"]
    classes = classes_of((text.label for text in records.labelled_texts(data, training)), former)
    if tokenizer is None:
        tokenizer = _trained(_all_texts(data, training), vocab_size)
    tokenizer.save_pretrained(directory / TOKENIZER)
    names: tuple[str, ...] = ()
    sizes = {}
    for part, source in sources.items():
        size = 0
        texts = records.labelled_texts(data, source)
        while some := list(itertools.islice(texts, AT_ONCE)):
            rows = encoded(tokenizer, some, data.sequence_length)
            check_ids(rows["input_ids"], vocab_size)
            names = tuple(rows)
            rows[LABELS] = np.array([number_of(text.label, classes, source) for text in some], np.int32)
            for name, values in rows.items():
                with (directory / f"{part}.{name}.bin").open("ab") as file:
                    file.write(values.tobytes())
            size += len(some)
        if not size:
            raise DataError(f"{source} has no texts")
        sizes[part] = size
    facts = {"classes": classes, "sizes": sizes, "names": names}
    (directory / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def encoded(
    tokenizer: PreTrainedTokenizerFast, texts: list[records.Labelled], length: int
) -> dict[str, np.ndarray]:
    """Return what a model reads of texts, int32 [texts, length] each."""
    second = None if texts[0].second is None else [text.second or "" for text in texts]
    options: dict[str, Any] = {"truncation": "longest_first", "padding": "max_length", "max_length": length}
    with tokenizer_refusals(tokenizer.name_or_path):
        encoded = tokenizer([text.first for text in texts], second, return_attention_mask=True, **options)
    return {name: np.array(values, np.int32) for name, values in encoded.items()}


def _all_texts(data: Data, source: str) -> Iterator[str]:
    for text in records.labelled_texts(data, source):
        yield text.first
        if text.second is not None:
            yield text.second


def _trained(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of these texts that marks their begin and end, as BERT's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = train_tokenizer(texts, vocab_size, CONTROLS)
    begin, end, filler = CONTROLS
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in (begin, end)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin}:0 $A:0 {end}:0", pair=f"{begin}:0 $A:0 {end}:0 $B:1 {end}:1", special_tokens=ids
    )
    tokenizer.cls_token, tokenizer.sep_token, tokenizer.pad_token = begin, end, filler
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer
