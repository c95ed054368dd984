"""cai evaluate RUN|DIR --data SOURCE, of models that classify"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cai_apps.applications.classification.config import Data
from cai_apps.config.arguments import parse
from cai_apps.config.ranges import COUNT, FILLED, Range


@dataclass(frozen=True)
class Arguments:
    """Classify samples that a model was not trained on: accuracy, precision and recall of each class, confusions."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Run directory with an export, or HF model directory."""
    data: Annotated[str, FILLED]
    """File, folder or glob of texts, or directory with a folder of pictures for each class, as data.source has them."""
    text: Annotated[str, FILLED] = "text"
    """Field of a record, or column of a table, with the text."""
    second_text: Annotated[str | None, FILLED] = None
    """Field of a second text beside it; None: there is none."""
    label: Annotated[str, FILLED] = "label"
    """Field with the class: a name, or a number from 0."""
    length: Annotated[int | None, Range(least=4)] = None
    """Tokens of a text; None: as the run was trained, or as the model takes, at most 512."""
    batch: Annotated[int, COUNT] = 32
    """Samples of one forward."""
    limit: Annotated[int | None, COUNT] = None
    """Samples that are read; None: all."""
    output: Path | None = None
    """File for what is said of each sample: a JSON object a line with its label, the predicted one, its probability."""
    json: bool = False
    """Print one JSON object; an error is one with "error"."""


def run(arguments: list[str]) -> int:
    """Run the command for models that classify."""
    options = parse(Arguments, arguments, command="evaluate")
    from cai_apps.applications.classification.evaluate import evaluate

    data = Data(source=options.data, text=options.text, second_text=options.second_text, label=options.label)
    outcome = evaluate(
        options.directory,
        data,
        length=options.length,
        batch=options.batch,
        limit=options.limit,
        output=options.output,
    )
    print(json.dumps(outcome.facts()) if options.json else "\n".join(outcome.lines()))
    return 0
