"""cai evaluate DIR --data FILE [--format text|chat|preferences] | --lm-eval TASKS"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from cai_apps.config.arguments import parse
from cai_apps.config.ranges import COUNT, FILLED, NATURAL, Range
from cai_apps.config.sections import BaseKind
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from cai_apps.applications.language.generate import Place


@dataclass(frozen=True)
class Arguments:
    """Measure a model on data that it was not trained on: the perplexity of texts or of answers, how often the chosen
    of two answers is the likelier one, or tasks of lm-evaluation-harness."""

    directory: Annotated[Path, tyro.conf.Positional]
    """HF model directory, a folder of peft with an adapter, a run directory with an export, or RUN/best."""
    data: Annotated[tuple[str, ...], FILLED] = ()
    """Files, folders or globs, as data.source has them."""
    format: Literal["text", "chat", "preferences"] = "text"
    """text: the perplexity of documents. chat: that of the answers of conversations. preferences: pairs of answers."""
    text_column: Annotated[str, FILLED] = "text"
    """The field or column that holds the text of a document."""
    join: bool = False
    """Read all documents as one text with blank lines between them, as perplexities of WikiText are published."""
    length: Annotated[int | None, Range(least=2)] = None
    """Tokens of a window; None: the positions of the model, at most 2048."""
    stride: Annotated[int | None, COUNT] = None
    """Tokens from the beginning of a window to that of the next, below the length; None: half of it. The smaller, the
    more context a token has, and the longer it takes."""
    batch: Annotated[int, COUNT] = 4
    """Windows of one forward."""
    limit: Annotated[int | None, COUNT] = None
    """Documents or records that are read, of a task the examples; None: all."""
    lm_eval: Annotated[tuple[str, ...], FILLED] = ()
    """Tasks of lm-evaluation-harness, such as "hellaswag" (cai-apps[evaluation])."""
    fewshot: Annotated[int | None, NATURAL] = None
    """Examples before each question of a task; None: as the task says."""
    task_folder: Annotated[Path | None, FILLED] = None
    """Folder with tasks of one's own, as lm-evaluation-harness has them."""
    adapter: Annotated[Path | None, FILLED] = None
    """Folder of peft with an adapter for the model."""
    base: BaseKind | None = None
    """What the linear layers of the model's blocks are kept in. Default: that of the run, or the dtype of the files."""
    chat_template: Annotated[Path | None, FILLED] = None
    """File with a chat template, in place of the tokenizer's."""
    json: bool = False
    """Print one JSON object; an error is one with "error"."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="evaluate")
    _check(options)
    from cai_apps.applications.language.generate import exported, place_of

    directory, base = exported(options.directory, options.base)
    place = place_of(directory, options.adapter, base=base)
    if options.lm_eval:
        return _harness(options, place)
    from cai_apps.applications.language.evaluate import Evaluation, Evaluator

    evaluator = Evaluator(
        place,
        Evaluation(
            options.length,
            options.stride,
            options.batch,
            options.limit,
            options.join,
            options.text_column,
            options.chat_template,
        ),
    )
    measures = {
        "text": evaluator.perplexity,
        "chat": evaluator.answers,
        "preferences": evaluator.preference,
    }
    outcome = measures[options.format](*options.data)
    print(json.dumps(outcome.facts()) if options.json else "\n".join(outcome.lines()))
    return 0


def _harness(options: Arguments, place: Place) -> int:
    """Run tasks of lm-evaluation-harness, and print their numbers."""
    from cai_apps.applications.language.harness import evaluate_tasks, need_harness, table_of

    need_harness()
    numbers = evaluate_tasks(
        place,
        options.lm_eval,
        batch=options.batch,
        length=options.length,
        limit=options.limit,
        fewshot=options.fewshot,
        folder=options.task_folder,
    )
    print(json.dumps(numbers, default=str) if options.json else "\n".join(table_of(numbers)))
    return 0


def _check(options: Arguments) -> None:
    """Refuse options that do not go together."""
    if bool(options.data) == bool(options.lm_eval):
        raise ConfigError(
            "an evaluation is of data or of tasks",
            got="both" if options.data else "neither",
            expected="--data FILE, or --lm-eval TASK",
        )
    wrong = {
        "--join": options.join and options.format != "text",
        "--text-column": options.text_column != "text" and options.format != "text",
        "--chat-template": options.chat_template is not None and options.format == "text",
        "--fewshot": options.fewshot is not None and not options.lm_eval,
        "--task-folder": options.task_folder is not None and not options.lm_eval,
        "--stride": options.stride is not None and bool(options.lm_eval),
    }
    if (name := next((name for name, is_wrong in wrong.items() if is_wrong), None)) is not None:
        what = "tasks" if options.lm_eval else f"data of the format {options.format}"
        raise ConfigError(f"{name} is not for {what}", fix="leave it out")
