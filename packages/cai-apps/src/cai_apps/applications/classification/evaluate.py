"""A model that classifies against samples that it was not trained on: how many are right, class by class."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cai_apps.applications.classification.classes import number_of
from cai_apps.applications.classification.config import Data
from cai_apps.applications.classification.model import kind_of, longest_of, side_of
from cai_apps.applications.classification.pictures import Normalization, Pictures, source_of
from cai_apps.applications.classification.records import labelled_texts
from cai_apps.applications.classification.texts import encoded, load_tokenizer
from cai_apps.compose.models import load_model_config
from cai_apps.compose.pretrained import opened
from cai_apps.config.adapters import is_adapter_folder
from cai_apps.config.file import parse
from cai_apps.run.files.directory import RunDirectory
from cai_mesh.errors import ConfigError, DataError
from cai_mesh.files import check_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LONGEST = 512
"""Tokens of a text where neither a run nor the model says less."""
OF_RUN = ("text", "second_text", "label", "sequence_length")
"""Keys of a run's data that say how samples are read."""
WIDEST = 20
"""Classes up to which all confusions are shown."""
Batch = tuple[dict[str, Tensor], list[int], list[str]]
"""What the model reads of some samples, their classes, and where each is found."""


@dataclass(frozen=True)
class Outcome:
    """How samples were classified.

    Args:
        classes: names of the classes.
        confusion: samples of class i that were taken for class j, int64 [classes, classes].
        loss: the mean cross entropy.
    """

    classes: Sequence[str]
    confusion: np.ndarray
    loss: float

    @property
    def accuracy(self) -> float:
        return float(self.confusion.trace() / self.confusion.sum())

    def by_class(self) -> dict[str, dict[str, float]]:
        """Return precision, recall, their harmonic mean f1, 0 where nothing is divided, and samples, by class."""
        right = self.confusion.diagonal()
        predicted, present = self.confusion.sum(0), self.confusion.sum(1)
        numbers = zip(self.classes, right, predicted, present, strict=True)
        return {
            name: {
                "precision": float(hits / max(claims, 1)),
                "recall": float(hits / max(count, 1)),
                "f1": float(2 * hits / max(claims + count, 1)),
                "samples": int(count),
            }
            for name, hits, claims, count in numbers
        }

    def facts(self) -> dict[str, Any]:
        """Return the numbers by name; macro_f1 is the mean over classes that have samples or were predicted."""
        classes = self.by_class()
        seen_classes = self.confusion.sum(0) + self.confusion.sum(1) > 0
        scores = np.array([numbers["f1"] for numbers in classes.values()])[seen_classes]
        return {
            "samples": int(self.confusion.sum()),
            "accuracy": self.accuracy,
            "macro_f1": float(scores.mean()),
            "loss": self.loss,
            "classes": classes,
            "confusion": self.confusion.tolist(),
        }

    def lines(self) -> list[str]:
        """Return the numbers as a table."""
        facts = self.facts()
        width = max(map(len, [*self.classes, "class"]))
        lines = [
            f"{facts['accuracy']:.2%} of {facts['samples']:,} samples are right (macro F1 {facts['macro_f1']:.4f}, "
            f"loss {facts['loss']:.4f})",
            f"{'class':<{width}}  precision  recall      F1  samples",
        ]
        lines += [
            f"{name:<{width}}  {row['precision']:9.4f}  {row['recall']:6.4f}  {row['f1']:6.4f}  {row['samples']:7,}"
            for name, row in facts["classes"].items()
        ]
        if len(self.classes) > WIDEST:
            return lines
        digits = max(len(f"{self.confusion.max():,}"), len(str(len(self.classes))))
        numbers = "  ".join(f"{number:>{digits}}" for number in range(len(self.classes)))
        lines.append(f"{'taken for':<{width + 4}}  {numbers}")
        lines += [
            f"{number:>2}: {name:<{width}}  " + "  ".join(f"{count:>{digits},}" for count in row)
            for number, (name, row) in enumerate(zip(self.classes, self.confusion, strict=True))
        ]
        return lines


def evaluate(
    directory: Path,
    source: str,
    fields: Mapping[str, Any],
    *,
    batch: int,
    limit: int | None,
    output: Path | None,
) -> Outcome:
    """Classify samples and compare.

    Args:
        directory: a run with an export, or an HF model directory.
        source: the place of the samples.
        fields: keys of `Data` that are given, such as `text`; others are the run's, and of a model without one the
            defaults, with texts of as many tokens as it takes, at most 512.
        batch: the number of samples of one forward.
        limit: the most samples that are read; None: all are.
        output: a file for what is said of each sample, a JSON object a line; None: there is none.

    Raises:
        ConfigError: there is no model that classifies.
        CheckpointError: its weights cannot be read, or are those of another model.
        DataError: a sample is broken, of another class, or there is none.
    """
    place, of_run = _place_of(directory)
    model = _opened(place)
    names: Any = model.config.id2label
    classes = [str(names[number]) for number in range(model.config.num_labels)]
    batches = _batches(place, model.config, {**of_run, **fields, "source": source}, classes, batch)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)  # type: ignore[arg-type]
    confusion, losses, count = np.zeros((len(classes),) * 2, np.int64), 0.0, 0
    file = None if output is None else output.open("w", encoding="utf-8")
    try:
        for inputs, labels, places in batches:
            room = len(labels) if limit is None else min(len(labels), limit - count)
            if room <= 0:
                break
            with torch.no_grad():
                logits = model(**{name: value.to(device) for name, value in inputs.items()}).logits
            log_probs = logits.float().log_softmax(-1).cpu()[:room]
            target = torch.tensor(labels[:room])
            losses += float(-log_probs.gather(1, target[:, None]).sum())
            predicted = log_probs.argmax(-1)
            np.add.at(confusion, (target.numpy(), predicted.numpy()), 1)
            count += room
            if file is not None:
                _note(file, classes, places, target, log_probs)
    finally:
        if file is not None:
            file.close()
    if not count:
        raise DataError(f"{source} has no samples")
    return Outcome(classes, confusion, losses / count)


def _place_of(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Return the directory of a model, and what the run that has trained it says of texts."""
    run = RunDirectory(directory)
    place: Path = directory
    of_run: dict[str, Any] = {}
    if run.config_file.is_file():
        place, table = run.export, parse(run.config_file).get("data", {})
        of_run = {name: table[name] for name in OF_RUN if name in table}
    if is_adapter_folder(place):
        raise ConfigError(
            f"{place} has adapters and no whole model",
            fix=f"`cai export {directory} DIR --merge`, and evaluate DIR",
        )
    if not (place / "config.json").is_file():
        raise ConfigError(
            f"there is no model at {place}",
            expected="a run that has ended, or a directory with a config.json and weights",
            fix="`cai export RUN DIR`, or `cai export RUN/best DIR`, writes what a run has so far",
        )
    return place, of_run


def _opened(place: Path) -> PreTrainedModel:
    """Return the model of a directory, in evaluation."""
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    check_weights(place)
    is_of_texts = kind_of(load_model_config(str(place)), str(place)) == "texts"
    make = AutoModelForSequenceClassification if is_of_texts else AutoModelForImageClassification
    return opened(make, place, "model that classifies").eval()


def _batches(
    place: Path, config: PretrainedConfig, fields: Mapping[str, Any], classes: Sequence[str], size: int
) -> Iterator[Batch]:
    """Return the samples of a source in batches, read by `fields` of `Data`."""
    data = Data(**{"sequence_length": min(longest_of(config), LONGEST), **fields})
    if kind_of(config, str(place)) == "texts":
        return _texts(place, data, config, classes, size)
    return _pictures(place, data, classes, side_of(config, str(place)), size)


def _texts(
    place: Path, data: Data, config: PretrainedConfig, classes: Sequence[str], size: int
) -> Iterator[Batch]:
    tokenizer, texts = load_tokenizer(place), labelled_texts(data, data.source)
    if (
        config.get_text_config().pad_token_id is None
    ):  # by it GPT-2 and its like find the last token of a text
        config.get_text_config().pad_token_id = config.pad_token_id = tokenizer.pad_token_id
    while some := list(itertools.islice(texts, size)):
        rows = encoded(tokenizer, some, data.sequence_length)
        inputs = {name: torch.from_numpy(values.astype(np.int64)) for name, values in rows.items()}
        labels = [number_of(text.label, classes, data.source) for text in some]
        yield inputs, labels, [text.first for text in some]


def _pictures(place: Path, data: Data, classes: Sequence[str], side: int, size: int) -> Iterator[Batch]:
    source = source_of(data.source, side)
    pictures = Pictures({"samples": source}, tuple(classes), Normalization.of(place), "")
    files: Sequence[Any] = getattr(source, "files", range(source.size))
    for first in range(0, source.size, size):
        numbers = np.arange(first, min(first + size, source.size))
        rows = pictures.rows("samples", numbers)
        labels = rows.pop("labels").tolist()
        yield rows, labels, [str(files[number]) for number in numbers]


def _note(
    file: IO[str], classes: Sequence[str], names: Sequence[str], target: Tensor, log_probs: Tensor
) -> None:
    """Write what was said of some samples: where each is from, its class, the likeliest one and its probability."""
    for name, label, numbers in zip(names, target.tolist(), log_probs, strict=False):
        best = int(numbers.argmax())
        line: Mapping[str, Any] = {
            "sample": name,
            "label": classes[label],
            "predicted": classes[best],
            "probability": round(float(numbers[best].exp()), 6),
        }
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
