"""cai evaluate RUN|DIR --data SOURCE, of models that classify"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cai_apps.config.arguments import parse
from cai_apps.config.ranges import COUNT, FILLED, Range
from cai_mesh.errors import ConfigError


@dataclass(frozen=True)
class Arguments:
    """Classify samples that a model was not trained on: accuracy, precision and recall of each class, confusions."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Run directory with an export, or HF model directory."""
    data: Annotated[str, FILLED]
    """File, folder or glob of texts, or directory with a folder of pictures for each class, as data.source has them."""
    text: Annotated[str | None, FILLED] = None
    """Field of a record, or column of a table, with the text; None: that of the run, else "text"."""
    second_text: Annotated[str | None, FILLED] = None
    """Field of a second text beside it; None: that of the run, else there is none."""
    label: Annotated[str | None, FILLED] = None
    """Field with the class, a name or a number from 0; None: that of the run, else "label"."""
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
    _check_output(options.output)
    from cai_apps.applications.classification.evaluate import evaluate

    names = ("text", "second_text", "label")
    fields = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.length is not None:
        fields["sequence_length"] = options.length
    outcome = evaluate(
        options.directory,
        options.data,
        fields,
        batch=options.batch,
        limit=options.limit,
        output=options.output,
    )
    print(json.dumps(outcome.facts()) if options.json else "\n".join(outcome.lines()))
    return 0


def _check_output(file: Path | None) -> None:
    """Raise ConfigError for a file that is there already, or that cannot be written."""
    if file is None:
        return
    if file.exists():
        raise ConfigError(
            f"{file} is there already", fix="name another file as --output, or move this one away"
        )
    if not file.absolute().parent.is_dir():
        raise ConfigError("--output is in a directory that is not there", got=str(file.absolute().parent))
