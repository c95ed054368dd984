"""The section of a config that says which text is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cai_apps.config.ranges import COUNT, FILLED, PART, Range


@dataclass(frozen=True)
class Data:
    source: Annotated[str, FILLED] = "stdlib"
    """'stdlib' (the Python standard library's text), a file of text or of records (.jsonl, .json, .csv, .tsv, .parquet;
    all but the last also as .gz, .bz2, .xz), a folder or a glob of such files, or a directory written by
    datasets.save_to_disk."""
    more_sources: Annotated[tuple[str, ...], FILLED] = ()
    """Further sources, read after `source` in this order."""
    text_column: Annotated[str, FILLED] = "text"
    """The field of a record, or the column of a table, that holds the text of a document."""
    tokenizer: Annotated[str, FILLED] = "auto"
    """'auto' (that of the model, where its weights are pretrained, else 'train'), 'train' (a byte-level BPE on this
    source, of the model's size), an HF directory or a hub id."""
    format: Literal["text", "chat"] = "text"
    """text: documents that are all learned. chat: conversations, of which answers are; `cai data check` shows them."""
    chat_template: Annotated[str | None, FILLED] = None
    """A file with the Jinja template that writes conversations; None: the tokenizer's own."""
    trained: tuple[str, ...] = ("all",)
    """What is learned of conversations: "all" answers of the assistant, the "last" of each, or the messages of the
    roles that are named."""
    special_tokens: Literal["text", "parse"] = "text"
    """Control tokens written in the text, such as </s>: 'text' like any other, or 'parse' them into what they spell."""
    boundaries: Literal["auto", "ignore", "keep"] = "auto"
    """ignore: all documents are one stream, cut into sequences, and tokens see the end of the document before. keep: a
    sequence holds whole documents where they fit, which do not see each other. auto: keep those of conversations,
    ignore those of texts."""
    sequence_length: Annotated[int, Range(least=2)] = 256
    """Tokens of one packed sequence."""
    limit_bytes: Annotated[int | None, COUNT] = None
    """Stop reading the source after this many bytes of text."""
    validation_fraction: Annotated[float, PART] = 0.02
    """Part of the sequences that is kept for validation and never trained on."""
    validation_source: Annotated[str | None, FILLED] = None
    """A source of its own for validation, in place of `validation_fraction`: a file, a folder or a glob."""
    streaming: bool = False
    """Tokenize text while the run goes on, in place of once before it: nothing is kept on the disk. Of `format` text;
    validation is on `validation_source`. A run that goes on reads again what it has read."""
    shuffle_buffer: Annotated[int, COUNT] = 1000
    """Documents of the buffer by which a stream is mixed, by train.seed; 1: they keep their order."""
    cache: Annotated[str, FILLED] = "~/.cache/cai"
    """Directory for trained tokenizers and tokenized text."""

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources, in the order in which they are read."""
        return (self.source, *self.more_sources)
