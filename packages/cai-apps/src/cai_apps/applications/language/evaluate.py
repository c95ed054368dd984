"""A model against held-out data: perplexity of texts and of answers, and which of two answers it finds likelier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cai_apps.applications.language.generate import Place, open_model, renderer_of
from cai_apps.applications.language.windows import Score, Scorer, Window, windows_of
from cai_apps.data.chat.prepare import conversation_of, placed
from cai_apps.data.chat.readers import read_records
from cai_apps.data.preference.records import Pair
from cai_apps.data.preference.render import render_pair
from cai_apps.data.preference.sources import check_kind, preference_of
from cai_apps.data.prepare import check_ids
from cai_apps.data.sources import documents
from cai_apps.data.tokenizer import load_tokenizer, prompt_ids
from cai_mesh.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LONGEST = 2048
"""Tokens of a window where a model says nothing of its positions, or of more."""
JOINT = "\n\n"
"""What stands between documents that are one text."""
Text = tuple[np.ndarray, np.ndarray | None]
"""The ids of a text, and marks of those that are to be predicted; None: all are."""


@dataclass(frozen=True)
class Evaluation:
    """Options of an evaluation.

    Args:
        length: the most tokens of a window; None: the model's positions, and at most `LONGEST`.
        stride: the tokens from one window to the next; None: half the length.
        batch: the number of windows of one forward.
        limit: the most documents or records that are read; None: all are.
        is_joined: whether documents are one text.
        column: the value of `data.text_column`.
        chat_template: a file with a chat template; None: the tokenizer's.
    """

    length: int | None = None
    stride: int | None = None
    batch: int = 4
    limit: int | None = None
    is_joined: bool = False
    column: str = "text"
    chat_template: Path | None = None


@dataclass(frozen=True)
class Perplexity:
    """What a model says of texts.

    Args:
        texts: the number of texts.
        targets: the number of predicted tokens.
        loss: the mean of their negative log-probabilities.
        accuracy: the part of them that are the likeliest tokens.
        length: the tokens of a window.
        stride: the tokens from one window to the next.
        bits_per_byte: the sum over the bytes of the texts, in bits, which compares models of several tokenizers; None:
            not all of a text is predicted.
    """

    texts: int
    targets: int
    loss: float
    accuracy: float
    length: int
    stride: int
    bits_per_byte: float | None

    def facts(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self) | {"perplexity": math.exp(min(self.loss, 700.0))}

    def lines(self) -> list[str]:
        """Return the numbers in a few lines."""
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return [
            f"perplexity {math.exp(min(self.loss, 700.0)):.4f} (loss {self.loss:.6f}{bits})",
            f"{self.accuracy:.2%} of {self.targets:,} tokens of {self.texts:,} texts are the likeliest, in windows of "
            f"{self.length:,} tokens at every {self.stride:,}",
        ]


@dataclass(frozen=True)
class Preference:
    """Which answers of pairs a model finds likelier.

    Args:
        pairs: the number of pairs.
        accuracy: the part of them whose chosen answer has the higher log-probability.
        accuracy_per_token: the same of the mean over the tokens of an answer.
        margin: the mean of the chosen answer's log-probability minus the other's.
    """

    pairs: int
    accuracy: float
    accuracy_per_token: float
    margin: float

    def facts(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the numbers in a few lines."""
        return [
            f"the chosen answer is likelier in {self.accuracy:.2%} of {self.pairs:,} pairs, by token in "
            f"{self.accuracy_per_token:.2%}; by {self.margin:.4f} on average"
        ]


class Evaluator:
    """A model with its tokenizer, ready to be evaluated.

    Args:
        place: the directories of the model.
        options: the windows, and what is read.

    Raises:
        ConfigError: the model cannot be opened, or the options are no windows of it.
    """

    def __init__(self, place: Place, options: Evaluation):
        self.options = options
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(place.tokenizer)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = open_model(place, self.device).to(self.device).eval()
        self.length, self.stride = window_sizes(self.model.config, options)
        self.scorer = Scorer(self.model, self.device, options.batch)

    def perplexity(self, *sources: str) -> Perplexity:
        """Return what the model says of the texts of sources.

        Raises:
            DataError: a source is missing or broken, or there is nothing to predict.
        """
        sizes = [0]

        def texts() -> Iterator[Text]:
            parts: Iterable[str] = islice(documents(*sources, column=self.options.column), self.options.limit)
            for text in [JOINT.join(parts)] if self.options.is_joined else parts:
                sizes[0] += len(text.encode(errors="replace"))
                yield np.array(prompt_ids(self.tokenizer, text), dtype=np.int64), None

        scores = self.scores(texts())
        return self._perplexity(scores, ", ".join(sources), sizes[0])

    def answers(self, *sources: str) -> Perplexity:
        """Return what the model says of the answers of the conversations of sources; errors as `perplexity`."""
        renderer = renderer_of(self.tokenizer, self.options.chat_template)

        def texts() -> Iterator[Text]:
            for record in islice(read_records(*sources), self.options.limit):
                with placed(record.place):
                    example = renderer.render(conversation_of(record))
                yield example.ids, example.trained

        return self._perplexity(self.scores(texts()), ", ".join(sources), None)

    def preference(self, *sources: str) -> Preference:
        """Return which answers of the pairs of sources the model finds likelier; errors as `perplexity`."""
        renderer = renderer_of(self.tokenizer, self.options.chat_template)

        def texts() -> Iterator[Text]:
            for record in islice(read_records(*sources), self.options.limit):
                pair = preference_of(record)
                check_kind(pair, "pairs", record.place)
                assert isinstance(pair, Pair)
                with placed(record.place):
                    example = render_pair(renderer, pair)
                for document in (example.chosen, example.rejected):
                    yield document.ids, document.trained

        scores = self.scores(texts())
        if not scores:
            raise DataError(f"there is no pair in {', '.join(sources)}", expected="at least one")
        sums = np.array([score.log_probability for score in scores]).reshape(-1, 2)
        counts = np.array([score.targets for score in scores]).reshape(-1, 2)
        means = sums / counts
        return Preference(
            len(sums),
            float((sums[:, 0] > sums[:, 1]).mean()),
            float((means[:, 0] > means[:, 1]).mean()),
            float((sums[:, 0] - sums[:, 1]).mean()),
        )

    def scores(self, texts: Iterable[Text]) -> list[Score]:
        """Return the score of each text.

        Raises:
            DataError: the tokenizer has ids that the model has no row for.
        """
        totals: list[Score] = []
        rows = self.model.get_input_embeddings().num_embeddings

        def windows() -> Iterator[Window]:
            for number, (ids, targets) in enumerate(texts):
                check_ids(ids, rows)
                totals.append(Score())
                yield from windows_of(ids, targets, self.length, self.stride, number)

        for window, score in self.scorer.scores(windows()):
            totals[window.text] += score
        return totals

    def _perplexity(self, scores: list[Score], names: str, size: int | None) -> Perplexity:
        total = sum(scores, Score())
        if not total.targets:
            raise DataError(
                f"there is nothing to predict in {names}", expected="a text of two tokens at least"
            )
        bits = -total.log_probability / math.log(2) / size if size else None
        loss = -total.log_probability / total.targets
        accuracy = total.correct / total.targets
        return Perplexity(len(scores), total.targets, loss, accuracy, self.length, self.stride, bits)


def window_sizes(config: Any, options: Evaluation) -> tuple[int, int]:
    """Return the tokens of a window, and those from one to the next.

    Args:
        config: the model's config of transformers.
        options: the options of the evaluation.

    Raises:
        ConfigError: a window is longer than the model's positions, or the next begins after its end.
    """
    positions = getattr(config, "max_position_embeddings", None)
    most = positions if isinstance(positions, int) and positions > 0 else None
    length = options.length or min(LONGEST, most or LONGEST)
    if most is not None and length > most:
        raise ConfigError(
            "a window is longer than the model's positions",
            got=f"--length {length}",
            expected=f"at most {most} (max_position_embeddings)",
        )
    stride = options.stride or max(1, length // 2)
    if stride >= length:
        raise ConfigError(
            "windows that do not overlap leave the first token of each without a prediction",
            got=f"--stride {stride}, windows of {length} tokens",
            expected=f"a stride of at most {length - 1}",
        )
    return length, stride
