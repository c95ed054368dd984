"""cai data check FILE [--tokenizer DIR|hub id] [--chat_template FILE] [--trained all|last|ROLES] [--json]"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from cai_apps.config.arguments import parse
from cai_apps.config.ranges import COUNT, FILLED
from cai_apps.config.terminal import printable, terminal
from cai_apps.run.exit_codes import FAILURE
from cai_apps.run.files.directory import RunDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from cai_apps.data.chat.check import Findings, Sample
    from cai_apps.data.chat.render import Renderer

LIKE_TRAINING = {"--model.name": "--tokenizer", "--data.": "--"}
"""Flags of `cai train`, by their beginnings, that are understood here, too."""
PART, BEGINNING = 1200, 800
"""Letters of a part of a conversation that are shown, and of its beginning where it is longer."""
MARKS = {"+": ("{+", "+}"), "-": ("{-", "-}")}
"""Signs around trained text and around answers that are not preferred, where there are no colours."""
COLOURS = {"+": "green", "-": "red"}
LEGENDS = {
    "conversations": "trained on: {}",
    "pairs": "the prompt, chosen {}, rejected {}",
    "judged": "desirable {}, not desirable {}",
}
"""The words after a record's place, by the kind of records."""


@dataclass(frozen=True)
class Arguments:
    """Look through a file of conversations, or of preferences (pairs of answers, or judged ones), before it is trained
    on: show three as the model reads them, what is trained on in colour, how long they are, and every line that is
    broken. The flags of `cai train` (--model.name, --data.chat_template ...) are understood, too."""

    action: Annotated[Literal["check"], tyro.conf.Positional]
    """check: the one thing that there is to do."""
    source: Annotated[str, tyro.conf.Positional, FILLED]
    """A .jsonl, .json or .parquet file, a glob, or a directory written by datasets.save_to_disk."""
    tokenizer: Annotated[str | None, FILLED] = None
    """A model's directory or hub id, or a run with an export; None: only the form of the lines is looked at."""
    chat_template: Annotated[str | None, FILLED] = None
    """A file with the Jinja template that writes conversations; None: the tokenizer's own."""
    trained: tuple[str, ...] = ("all",)
    """What is trained on: "all" answers, the "last" of each conversation, or the messages of the roles named."""
    special_tokens: Literal["text", "parse"] = "text"
    """Control tokens that a message spells, such as </s>: 'text' like any other, or 'parse' them."""
    sequence_length: Annotated[int | None, COUNT] = None
    """Tokens at which a conversation is cut, and beyond which a pair or a judged answer is left out; None: none is."""
    json: bool = False
    """Print one JSON object: "kind", "records", "lengths", "problems"; an error is one with "error"."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, [_flag(argument) for argument in arguments], command="data")
    from cai_apps.data.preference.check import check_any

    tokenizer, renderer = _renderer(options)
    findings = check_any(options.source, renderer, options.sequence_length, options.trained)
    if options.json:
        print(json.dumps(_facts(findings)))
    else:
        _show(findings, tokenizer)
    return FAILURE if findings.problems else 0


def _flag(argument: str) -> str:
    """Return a flag of `cai train` as it is called here."""
    for beginning, name in LIKE_TRAINING.items():
        if argument.startswith(beginning):
            return name + argument.removeprefix(beginning)
    return argument


def _renderer(options: Arguments) -> tuple[PreTrainedTokenizerFast | None, Renderer | None]:
    if options.tokenizer is None:
        return None, None
    from cai_apps.data.chat.render import Renderer
    from cai_apps.data.chat.template import load_template
    from cai_apps.data.tokenizer import load_tokenizer

    run_directory = RunDirectory(Path(options.tokenizer).expanduser())
    place = run_directory.export if run_directory.config_file.is_file() else options.tokenizer
    tokenizer = load_tokenizer(place)
    template = load_template(tokenizer, options.chat_template)
    return tokenizer, Renderer(tokenizer, template, options.trained, options.special_tokens)


def _facts(findings: Findings) -> dict[str, object]:
    return {
        "kind": findings.kind,
        "records": findings.count,
        "lengths": None if findings.lengths is None else findings.lengths.facts(),
        "problems": [str(error) for error in findings.problems],
    }


def _show(findings: Findings, tokenizer: PreTrainedTokenizerFast | None) -> None:
    for sample in findings.samples:
        _show_sample(sample, LEGENDS[findings.kind])
    if findings.lengths is None:
        print("only the form of records was looked at; --tokenizer MODEL shows them as the model reads them")
    elif findings.ends:
        print("\n".join(findings.lengths.lines()))
        print(_ends(findings, tokenizer))
    for error in findings.problems:
        print(f"\n{error}")
    broken = len(findings.problems)
    print(
        f"\n{findings.count:,} records, {broken:,} broken"
        if broken
        else f"{findings.count:,} records, none broken"
    )


def _ends(findings: Findings, tokenizer: PreTrainedTokenizerFast | None) -> str:
    """Return by which tokens answers end, and that generation stops at another one where it does."""
    assert tokenizer is not None
    names = {number: tokenizer.convert_ids_to_tokens(number) for number in findings.ends if number >= 0}
    text = f"answers end with {' or '.join(names.values()) or 'no control token'}"
    if all(number == tokenizer.eos_token_id for number in names):
        return text
    return (
        f"{text}; the tokenizer's own end is {tokenizer.eos_token}: generation_config.json has to name those above as "
        "eos_token_id, too, for generation to stop there"
    )


def _show_sample(sample: Sample, legend: str) -> None:
    """Print a record, trained text in colour, or between `MARKS` where there is none.

    Args:
        sample: the record.
        legend: the words after its place, with a gap for each mark.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(file=terminal(), highlight=False, soft_wrap=True, emoji=False)
    has_colours = console.color_system is not None and not console.no_color
    colours = [f"in {colour}" for colour in COLOURS.values()]
    signs = [f"between {begin} and {end}" for begin, end in MARKS.values()]
    title = f"{sample.place} ({legend.format(*(colours if has_colours else signs))})\n"
    text = Text(printable(title), style="bold" if has_colours else "")
    for part, mark in sample.parts:
        part = printable(_shortened(part))
        if has_colours:
            text.append(part, style=f"not bold {COLOURS.get(mark, '')}".rstrip())
        else:
            text.append(part.join(MARKS[mark]) if mark else part)
    console.print(text, end="\n\n")


def _shortened(part: str) -> str:
    """Return a part of a conversation, without its middle where it is long."""
    if len(part) <= PART:
        return part
    end = PART - BEGINNING
    return f"{part[:BEGINNING]} ... {len(part) - PART:,} more letters ... {part[-end:]}"
